"""Files of pictures and films, opened with Pillow: what is in them, and how large.

Blocking, for a thread: it decodes every frame, as a model would have to, and throws the pixels away. It must not know
where the bytes came from.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from ...errors import BadRequest

MAX_PIXELS: Final = 64 * 1024 * 1024
"""Of one frame: a file of some kilobytes can claim gigabytes."""
MAX_FRAMES: Final = 64
"""Frames of a film that are looked at; of more, as many are taken at even distances."""
FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP", "BMP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One item, decoded. A picture has one frame, whatever else is in its file."""

    width: int
    height: int
    frames: int = 1


def decode_item(data: bytes, *, kind: str) -> Picture:
    """Decode a fetched item: "image" or "video". Raises BadRequest with a reason that names no source."""
    # Not above: a worker without media, and every command of the package, would pay for the import.
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            # Only the header has been read so far.
            if width * height > MAX_PIXELS:
                raise BadRequest(f"{kind} of {width}x{height} is too large: at most {MAX_PIXELS} pixels")
            if kind == "image":
                opened.load()
                return Picture(width=width, height=height)
            total = getattr(opened, "n_frames", 1)
            chosen = _evenly(total)
            for frame in chosen:
                opened.seek(frame)
                opened.load()
            return Picture(width=width, height=height, frames=len(chosen))
    except UnidentifiedImageError as exc:
        raise BadRequest(f"{kind} cannot be decoded: it is none of {', '.join(FORMATS)}") from exc
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise BadRequest(f"{kind} is too large: at most {MAX_PIXELS} pixels") from exc
    # What Pillow raises for files that are cut off or lie about themselves: there is no list of it.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error, zlib.error) as exc:
        raise BadRequest(f"{kind} cannot be decoded: {exc}") from exc


def _evenly(total: int) -> range | list[int]:
    if total <= MAX_FRAMES:
        return range(total)
    return [index * (total - 1) // (MAX_FRAMES - 1) for index in range(MAX_FRAMES)]
