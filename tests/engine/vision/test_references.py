"""The servicer's checks of references, in its order."""

from __future__ import annotations

import pytest

from trio_router.engine.vision.references import check_limits, data_bytes, read_references
from trio_router.engine.vision.settings import MediaSettings
from trio_router.errors import BadRequest
from trio_router.protocol.messages import MediaRef, MediaRefs, Modality

SETTINGS = MediaSettings(processor="inprocess")


def refs(*urls: str, modality: int = Modality.IMAGE) -> MediaRefs:
    return MediaRefs(items=[MediaRef(modality=modality, url=url) for url in urls])


def read(*urls: str, settings=SETTINGS, **about):
    return read_references(refs(*urls, **about), settings=settings)


def test_kinds_and_schemes_are_read():
    (first,) = read("HTTPS://o/x", modality=Modality.VIDEO)
    assert (first.kind, first.scheme, first.url) == ("video", "https", "HTTPS://o/x")


@pytest.mark.parametrize("settings", [MediaSettings(), MediaSettings(processor="inprocess", language_model_only=True)])
def test_without_a_processor_even_none_are_refused(settings):
    with pytest.raises(BadRequest, match="no media processor"):
        read(settings=settings)


@pytest.mark.parametrize(
    ("urls", "modality", "complaint"),
    [
        ([], Modality.IMAGE, "carries no items"),
        (["http://o/x"], Modality.UNSPECIFIED, r"media_refs\[0\]: unsupported modality 0"),
        (["http://o/x"], 7, r"media_refs\[0\]: unsupported modality 7"),
        (["http://o/x", ""], Modality.IMAGE, r"media_refs\[1\]: empty url"),
        # An empty URL is seen before the scheme of the one before it.
        (["ftp://o/x", ""], Modality.IMAGE, r"media_refs\[1\]: empty url"),
        (["http://o/x", "ftp://o/x"], Modality.IMAGE, r"media_refs\[1\]: url scheme 'ftp' is not accepted"),
        (["file:///etc/passwd"], Modality.IMAGE, "url scheme 'file' is not accepted"),
        (["/etc/passwd"], Modality.IMAGE, "url scheme '' is not accepted"),
    ],
)
def test_the_first_fault_is_named(urls, modality, complaint):
    with pytest.raises(BadRequest, match=complaint):
        read(*urls, modality=modality)


def test_no_complaint_quotes_a_url():
    with pytest.raises(BadRequest) as caught:
        read("evil-scheme-" * 10 + "://me:secret@o/")
    assert "secret" not in caught.value.message


class TestLimits:
    @pytest.mark.parametrize(("modality", "most"), [(Modality.IMAGE, 8), (Modality.VIDEO, 2), (Modality.AUDIO, 0)])
    def test_of_each_kind(self, modality, most):
        check_limits(read(*["http://o/x"] * most or ["http://o/x"], modality=modality)[:most], settings=SETTINGS)
        with pytest.raises(BadRequest, match=rf"At most {most} \w+\(s\) may be provided"):
            check_limits(read(*["http://o/x"] * (most + 1), modality=modality), settings=SETTINGS)

    def test_one_number_in_place_of_all(self):
        one = MediaSettings(processor="inprocess", max_items=1)
        with pytest.raises(BadRequest, match="At most 1"):
            check_limits(read("http://o/x", "http://o/x"), settings=one)

    def test_data_is_measured_before_it_is_decoded(self):
        small = MediaSettings(processor="inprocess", max_item_bytes=30)
        check_limits(read("data:;base64," + "A" * 40), settings=small)
        with pytest.raises(BadRequest, match="about 33 bytes of data, the limit is 30"):
            check_limits(read("data:;base64," + "A" * 44), settings=small)

    def test_the_measure(self):
        assert data_bytes("data:image/png;base64," + "A" * 400) == 300
        assert data_bytes("data:text/plain," + "A" * 400) == 400
