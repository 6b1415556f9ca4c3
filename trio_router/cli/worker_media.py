"""The options of a reference worker that are about media."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..config import BYTES, COUNT, PATH, SWITCH, TEXT, Row, Section, Values, choice
from ..engine.vision.settings import USUAL_SCHEMES, MediaSettings, Processor

_DEFAULT: Final = MediaSettings()

MEDIA_SECTION: Final = Section(
    name="media",
    title="images and videos",
    rows=(
        Row(
            name="mm_processor",
            kind=choice(*(processor.value for processor in Processor)),
            default=Processor.OFF.value,
            help="who fetches and processes the media that requests refer to; inprocess also makes it claim a model"
            " that takes media",
        ),
        Row(
            name="mm_media_ref_schemes",
            kind=TEXT,
            metavars=("LIST",),
            help=f"what references may begin with (default: {', '.join(USUAL_SCHEMES)}; and file,"
            " where there is a directory for it)",
        ),
        Row(
            name="mm_max_items",
            kind=COUNT,
            help=f"items of each kind in one request (default: {_DEFAULT.image_limit} images, {_DEFAULT.video_limit}"
            " videos)",
        ),
        Row(name="mm_max_item_bytes", kind=BYTES, default=_DEFAULT.max_item_bytes, help="most bytes of one item"),
        Row(
            name="allowed_local_media_path",
            kind=PATH,
            metavars=("DIR",),
            help="directory below which file: references may name files",
        ),
        Row(
            name="allowed_media_domains",
            kind=TEXT,
            metavars=("LIST",),
            help="hosts that media may be fetched from, also after a redirect, separated by commas (default: any)",
        ),
        Row(
            name="language_model_only",
            kind=SWITCH,
            default=False,
            help="leave the eyes of a model that takes media out: it takes none, and advertises no processor",
        ),
        Row(
            name="no_identity",
            kind=SWITCH,
            default=False,
            help="be an older worker, whose prefill legs tell nothing of the media they processed",
        ),
    ),
)


def media_settings(values: Values) -> MediaSettings:
    """Make the record. Raises ConfigError for what cannot go together."""
    allowed = values["allowed_local_media_path"]
    usual = USUAL_SCHEMES if allowed is None else (*USUAL_SCHEMES, "file")
    schemes = _listed(values["mm_media_ref_schemes"])
    return MediaSettings(
        processor=values["mm_processor"],
        source=_source(values.source("mm_processor")),
        schemes=usual if schemes is None else schemes,
        allowed_local_path=None if allowed is None else Path(allowed).expanduser(),
        allowed_domains=_listed(values["allowed_media_domains"]) or (),
        max_items=values["mm_max_items"],
        max_item_bytes=values["mm_max_item_bytes"],
        language_model_only=values["language_model_only"],
        identity=not values["no_identity"],
    )


def _listed(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip().lower() for word in text.split(",") if word.strip())


def _source(found: str) -> str:
    """Where a setting came from, in the words of a real worker, which has no file of settings."""
    if found == "default":
        return found
    return "flag" if found.startswith("--") else "env"
