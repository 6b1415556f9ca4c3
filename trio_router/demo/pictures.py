"""What `--image` names, made into a URL that a chat can carry; and a look at what workers then fetch.

It must not know the fleet or the chat.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..engine.vision.fetch import Fetcher
from ..engine.vision.pictures import FORMATS, decode_item
from ..engine.vision.references import Reference
from ..engine.vision.settings import MediaSettings
from ..errors import BadRequest, ConfigError
from ..media.hosts import host_of, is_local_name, is_public
from ..offload import Offload

SAMPLE: Final = "sample"
"""The word for a picture that is made on the spot; a file of that name is ./sample."""
MAX_BYTES: Final = MediaSettings().max_item_bytes
"""What the demo's workers take."""
PUBLIC_ONLY: Final = (
    "--image: the host is not a public one, and clients have media fetched from public hosts only;"
    " add --mm-allow-private-media-hosts, or give a file"
)

_SAMPLE_SIZE: Final = (640, 480)
_WEB: Final = ("http", "https")
_OPTION: Final = "--image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """`source` as it was given; `url` is what the chat carries."""

    source: str
    url: str = field(repr=False)


def find_picture(given: str, *, allow_private_hosts: bool = False) -> Picture:
    """Make the sample, read the file, or check the URL, which workers are to fetch. Blocking.

    Raises ConfigError that names the option: for what is no picture, or will not be fetched.
    """
    if given == SAMPLE:
        return Picture(source=given, url=_data_url(sample_picture()))
    scheme, mark, _rest = given.partition("://")
    if given.startswith("data:"):
        scheme, mark = "data", ":"
    if not mark:
        return Picture(source=given, url=_data_url(_read(given)))
    if scheme.lower() not in _WEB:
        raise ConfigError(
            f"{_OPTION}: {scheme[:16]}: URLs are not taken; give a file, an http or https URL, or {SAMPLE}"
        )
    _check_host(given, allow_private=allow_private_hosts)
    return Picture(source=given, url=given)


def sample_picture() -> bytes:
    """A harbour in the evening, as a PNG: the same bytes each time."""
    # Not above: whoever shows no picture would pay for the import.
    from PIL import Image, ImageDraw

    width, height = _SAMPLE_SIZE
    shore = height * 5 // 8
    image = Image.new("RGB", _SAMPLE_SIZE, (24, 60, 92))
    draw = ImageDraw.Draw(image)
    for y in range(shore):
        draw.line((0, y, width, y), fill=(250 - y // 6, 140 + y // 4, 90 + y // 3))
    draw.ellipse((430, 170, 530, 270), fill=(255, 236, 170))
    draw.rectangle((60, 150, 100, shore), fill=(236, 232, 224))
    draw.rectangle((54, 130, 106, 156), fill=(176, 48, 40))
    draw.polygon([(0, shore), (0, 280), (220, shore)], fill=(60, 56, 60))
    draw.polygon([(270, 350), (430, 350), (400, 390), (300, 390)], fill=(92, 52, 36))
    draw.polygon([(350, 190), (350, 340), (270, 340)], fill=(244, 240, 230))
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def _read(given: str) -> bytes:
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    try:
        with Path(given).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{_OPTION}: {shown}: {getattr(exc, 'strerror', None) or 'no path'}") from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{_OPTION}: {shown} has more than the {MAX_BYTES} bytes that workers take")
    try:
        decode_item(data, kind="image")
    except BadRequest as exc:
        raise ConfigError(f"{_OPTION}: {shown} is no picture that workers can read: {exc.message}") from exc
    return data


def _data_url(data: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        kind = (opened.format or "png").lower()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _check_host(url: str, *, allow_private: bool) -> None:
    """What the router would refuse unresolved: told at once, before anything is started."""
    try:
        host = host_of(url, part=_OPTION)
    except BadRequest as exc:
        raise ConfigError(exc.message) from exc
    private = is_local_name(host.name) or (host.address is not None and not is_public(host.address))
    if private and not allow_private:
        raise ConfigError(PUBLIC_ONLY)


class Watch:
    """A worker's fetcher that also notes how large each picture is."""

    def __init__(self, fetcher: Fetcher, *, offload: Offload, note: Callable[[tuple[int, int]], None]) -> None:
        """`offload` runs decoding; `note` gets width and height."""
        self._fetcher = fetcher
        self._offload = offload
        self._note = note

    async def __call__(self, reference: Reference) -> bytes:
        """Raises what the fetcher does, and BadRequest for what is no picture, as a worker itself would next."""
        data = await self._fetcher(reference)
        picture = await self._offload(lambda: decode_item(data, kind=reference.kind))
        self._note((picture.width, picture.height))
        return data
