"""Fetching all items of a request: from where, within what, and what one failure does to the others."""

from __future__ import annotations

import base64
import os

import pytest
import trio

from trio_router.engine.vision.fetch import MediaFetcher, decode_data_url, fetch_all
from trio_router.engine.vision.references import Reference, scheme_of
from trio_router.engine.vision.settings import MediaSettings
from trio_router.engine.vision.web import MediaUnavailable
from trio_router.errors import BadRequest
from trio_router.offload import inline
from trio_router.rpc.memory import MemoryNetwork


def ref(url: str, kind: str = "image") -> Reference:
    return Reference(kind=kind, scheme=scheme_of(url), url=url)


def make_fetcher(**settings) -> MediaFetcher:
    return MediaFetcher(MediaSettings(**settings), dialer=MemoryNetwork().dial, offload=inline)


class TestDataUrls:
    def test_base64_is_decoded(self):
        assert decode_data_url("data:image/png;base64,AAEC") == b"\0\1\2"
        assert decode_data_url("DATA:image/png;x=y;BASE64,AAEC%3D%3D"[:-6]) == b"\0\1\2"
        assert decode_data_url("data:;base64,%41AEC") == b"\0\1\2"

    @pytest.mark.parametrize("url", ["data:,abc", "data:text/plain,abc", "data:image/png;base64"])
    def test_others_are_not_supported(self, url):
        with pytest.raises(BadRequest, match="only base64"):
            decode_data_url(url)

    @pytest.mark.parametrize("payload", ["AAE", "A A=", "ÄÄÄÄ", "A-_="])
    def test_what_is_none_is_refused(self, payload):
        with pytest.raises(BadRequest, match="not base64"):
            decode_data_url(f"data:;base64,{payload}")

    async def test_one_over_the_limit_is_refused(self):
        fetch = make_fetcher(max_item_bytes=10)
        assert await fetch(ref("data:;base64," + base64.b64encode(b"x" * 10).decode())) == b"x" * 10
        with pytest.raises(BadRequest, match="more than 10 bytes"):
            await fetch(ref("data:;base64," + base64.b64encode(b"x" * 11).decode()))


class TestFiles:
    @pytest.fixture
    def fetch(self, tmp_path):
        (tmp_path / "open").mkdir()
        (tmp_path / "open" / "a b.png").write_bytes(b"picture")
        (tmp_path / "closed").write_bytes(b"secret")
        (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
        settings = {"schemes": ("file",), "allowed_local_path": tmp_path / "open", "max_item_bytes": 7}
        return lambda path: make_fetcher(**settings)(ref(f"file://{path}"))

    async def test_what_is_in_the_directory_may_be_read(self, fetch, tmp_path):
        assert await fetch(f"{tmp_path}/open/a%20b.png") == b"picture"
        assert await fetch(f"localhost{tmp_path}/open/a%20b.png") == b"picture"

    @pytest.mark.parametrize("path", ["closed", "open/../closed", "open/%2e%2e/closed", "open/link"])
    async def test_what_is_not_may_not(self, fetch, tmp_path, path):
        with pytest.raises(BadRequest, match="outside the directory"):
            await fetch(f"{tmp_path}/{path}")

    @pytest.mark.parametrize("path", ["open/none.png", "open", "open/%00"])
    async def test_what_cannot_be_read_is_refused(self, fetch, tmp_path, path):
        with pytest.raises(BadRequest, match="cannot be read"):
            await fetch(f"{tmp_path}/{path}")

    async def test_a_path_longer_than_any_is_not_even_looked_for(self, fetch, monkeypatch):
        monkeypatch.setattr("pathlib.Path.resolve", lambda path: pytest.fail("resolved"))
        with pytest.raises(BadRequest, match="too long"):
            await fetch("/" + "x/" * 10_000)

    async def test_a_pipe_is_not_waited_for(self, fetch, tmp_path, monkeypatch):
        os.mkfifo(tmp_path / "open" / "pipe")
        monkeypatch.setattr("pathlib.Path.open", lambda path, mode: pytest.fail("opened"))
        with pytest.raises(BadRequest, match="not a regular one"):
            await fetch(f"{tmp_path}/open/pipe")

    async def test_nor_on_another_host(self, fetch):
        with pytest.raises(BadRequest, match="no file of this machine"):
            await fetch("server/share/x.png")

    async def test_one_over_the_limit_is_refused(self, fetch, tmp_path):
        (tmp_path / "open" / "large").write_bytes(b"x" * 8)
        with pytest.raises(BadRequest, match="more than 7 bytes"):
            await fetch(f"{tmp_path}/open/large")


class TestTheWeb:
    @pytest.mark.parametrize(("kind", "seconds"), [("image", 10.0), ("video", 30.0)])
    async def test_an_origin_that_takes_too_long_may_be_tried_again(self, kind, seconds):
        network = MemoryNetwork()
        network.listen("o:80")
        fetch = MediaFetcher(MediaSettings(), dialer=network.dial, offload=inline)
        with pytest.raises(MediaUnavailable, match=f"within {seconds:g} s"):
            await fetch(ref("http://o/", kind))
        assert trio.current_time() == pytest.approx(seconds)

    async def test_hosts_may_be_limited(self):
        fetch = make_fetcher(allowed_domains=("good.example",))
        with pytest.raises(BadRequest, match="allowed-media-domains"):
            await fetch(ref("http://bad.example/"))
        with pytest.raises(MediaUnavailable, match="could not be reached"):
            await fetch(ref("http://good.example/"))

    async def test_a_redirect_to_a_scheme_that_is_not_accepted_is_refused(self):
        fetch = make_fetcher(schemes=("https",))
        with pytest.raises(BadRequest, match="does not accept"):
            await fetch(ref("http://o/"))


class TestAllOfARequest:
    async def test_they_are_fetched_at_once_and_come_in_order(self):
        async def fetch(reference):
            await trio.sleep(float(reference.url))
            return reference.url.encode()

        assert await fetch_all([ref("3"), ref("1"), ref("2")], fetcher=fetch) == [b"3", b"1", b"2"]
        assert trio.current_time() == pytest.approx(3)

    @pytest.mark.parametrize("error", [BadRequest("no", code="x"), MediaUnavailable("later")])
    async def test_the_first_failure_ends_the_others(self, error):
        left = []

        async def fetch(reference):
            try:
                await trio.sleep(float(reference.url))
            except trio.Cancelled:
                left.append(reference.url)
                raise
            raise error

        with pytest.raises(type(error), match=rf"^media_refs\[1\]: {error.message}$") as caught:
            await fetch_all([ref("3"), ref("1"), ref("2")], fetcher=fetch)
        assert caught.value.error_code == error.error_code
        assert sorted(left) == ["2", "3"]
        assert trio.current_time() == pytest.approx(1)

    async def test_failures_of_one_moment_are_one(self):
        async def fetch(reference):
            raise BadRequest(reference.url)

        with pytest.raises(BadRequest, match=r"media_refs\["):
            await fetch_all([ref("a"), ref("b")], fetcher=fetch)


def test_no_reference_is_shown_by_its_record():
    assert "secret" not in repr(ref("http://me:secret@o/"))
