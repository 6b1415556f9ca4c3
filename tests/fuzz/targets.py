"""Every target by name. A target takes any bytes, and raises if something was wrong with us."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from . import http2_targets, message_targets

CORPUS: Final = Path(__file__).parent / "corpus"

TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "http2_server": http2_targets.server,
    "http2_client": http2_targets.client,
    "http2_raw": http2_targets.raw_server,
    "http2_split": http2_targets.any_split,
    "codec": message_targets.codec,
    "chunk": message_targets.chunk,
    "edit": message_targets.edits,
    "http1": message_targets.http1,
}
