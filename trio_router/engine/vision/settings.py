"""What a reference worker is told about media. Plain records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

from ...errors import ConfigError

MIB: Final = 1024 * 1024


@unique
class Processor(StrEnum):
    """Who turns references into what the model takes."""

    OFF = "off"
    INPROCESS = "inprocess"


KNOWN_SCHEMES: Final = ("http", "https", "data", "file")
USUAL_SCHEMES: Final = ("http", "https", "data")

_COUNTS: Final = ("image_limit", "video_limit", "max_items", "max_item_bytes", "max_redirects", "max_inflight")
_POSITIVE: Final = ("fetch_seconds", "video_fetch_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Durations in seconds, sizes in bytes. The defaults are those of vLLM's servicer, where it has any."""

    processor: str = Processor.OFF
    """A `Processor` or its value. With one, the model is the variant that sees."""
    source: str = "default"
    """Who chose the processor, as `GetServerInfo` words it: "flag", "env" or "default"."""
    schemes: tuple[str, ...] = USUAL_SCHEMES
    """What references may begin with. `file` needs `allowed_local_path`."""
    allowed_local_path: Path | None = None
    """The directory that `file:` references may name files in."""
    allowed_domains: tuple[str, ...] = ()
    """Hosts that may be asked, also after a redirect; empty: any."""
    image_limit: int = 8
    video_limit: int = 2
    """Items of one request that the engine takes."""
    max_items: int | None = None
    """In place of both of them."""
    max_item_bytes: int = 32 * MIB
    fetch_seconds: float = 10.0
    video_fetch_seconds: float = 30.0
    max_redirects: int = 5
    max_inflight: int = 64
    """Requests whose media are fetched and processed at one time; as many more may wait."""
    language_model_only: bool = False
    """The model's eyes are left out: it takes no media, though its prompts may have been made with some."""
    position_grids: bool = True
    """Whether the model's positions depend on the grids of its media (M-RoPE), as Qwen's do. Without, hashes are all
    that a decode worker has to be told."""
    identity: bool = True
    """Whether prefill legs return one; without it this is a worker from before there were any."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "processor", Processor(self.processor))
        except ValueError:
            known = ", ".join(Processor)
            raise ConfigError(f"mm_processor {self.processor!r} is none of {known}") from None
        for scheme in self.schemes:
            if scheme not in KNOWN_SCHEMES:
                raise ConfigError(f"mm_media_ref_schemes: {scheme!r} is none of {', '.join(KNOWN_SCHEMES)}")
        if "file" in self.schemes and self.allowed_local_path is None:
            raise ConfigError("mm_media_ref_schemes: file needs allowed_local_media_path, the directory it may read")
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"media settings: {field} must be at least 1, not {value}")
        for field in _POSITIVE:
            if not getattr(self, field) > 0:
                raise ConfigError(f"media settings: {field} must be above 0, not {getattr(self, field)}")

    @property
    def sees(self) -> bool:
        """Whether the model is the variant for media, whether or not it was loaded with its eyes."""
        return self.processor is not Processor.OFF or self.language_model_only

    @property
    def advertised(self) -> str:
        """The processor in force; empty when there is none."""
        return "" if self.language_model_only or self.processor is Processor.OFF else self.processor

    @property
    def limits(self) -> dict[str, int]:
        """Most items of one request by kind, in force."""
        images, videos = self.max_items or self.image_limit, self.max_items or self.video_limit
        return {"image": images, "video": videos}

    def fetch_timeout(self, kind: str) -> float:
        return self.video_fetch_seconds if kind == "video" else self.fetch_seconds
