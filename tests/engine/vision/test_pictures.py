"""Files of pictures and films: what is seen in them, and what is refused."""

from __future__ import annotations

import io
import zlib

import pytest
from PIL import Image

from trio_router.engine.vision.pictures import MAX_FRAMES, Picture, decode_item
from trio_router.errors import BadRequest
from trio_router.testing.origin import film, picture


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_pictures_of_every_form(form, mode):
    out = io.BytesIO()
    image = Image.new("RGB", (40, 30), "red").convert(mode)
    (image.convert("RGB") if form in ("JPEG", "WEBP") else image).save(out, format=form)
    assert decode_item(out.getvalue(), kind="image") == Picture(width=40, height=30)


def test_a_film_has_its_frames_and_as_a_picture_only_the_first():
    data = film("red", "blue", "lime", size=(50, 40))
    assert decode_item(data, kind="video") == Picture(width=50, height=40, frames=3)
    assert decode_item(data, kind="image") == Picture(width=50, height=40)


def test_of_a_long_film_so_many_frames_are_taken():
    data = film(*(f"rgb({index}, 0, 0)" for index in range(MAX_FRAMES + 20)))
    assert decode_item(data, kind="video").frames == MAX_FRAMES


def test_an_animated_webp_is_a_film():
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, format="WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert decode_item(out.getvalue(), kind="video").frames == 2


GOOD = picture()


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(
    "data",
    [b"", b"<html>", GOOD[:8], GOOD[:40], GOOD[:60] + b"\0" * 20 + GOOD[80:], film("red", "blue")[:60]],
    ids=["nothing", "a page", "a signature", "a header", "damaged", "half a film"],
)
def test_what_is_broken_is_the_senders(kind, data):
    with pytest.raises(BadRequest, match=f"{kind} cannot be decoded"):
        decode_item(data, kind=kind)


@pytest.mark.parametrize("size", [(9000, 9000), (12000, 12000), (60000, 60000)])
def test_a_bomb_is_refused_by_its_header(size):
    out = io.BytesIO()
    Image.new("1", (8, 8)).save(out, format="PNG")
    data = bytearray(out.getvalue())
    data[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(BadRequest, match="too large"):
        decode_item(bytes(data), kind="image")
