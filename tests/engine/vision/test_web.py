"""GETs against origins on memory links: bodies, redirects, bounds, and whose fault a failure is."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
import trustme

from trio_router.engine.vision.web import MediaUnavailable, Web
from trio_router.errors import BadRequest, LinkError
from trio_router.rpc.memory import MemoryNetwork
from trio_router.rpc.tlstransport import TlsTransport


def answer(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    told = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


class Site:
    """Answers by host and path; remembers the requests."""

    def __init__(self, network, nursery):
        self.network, self.nursery = network, nursery
        self.requests: list[bytes] = []
        self.open = 0

    def serve(self, address, *answers, tls=None):
        listener = self.network.listen(address)

        async def run():
            for reply in answers:
                transport = await listener.accept()
                if tls is not None:
                    transport = TlsTransport(transport, tls, server_side=True, protocol=None)
                    # An asker that does not believe it leaves.
                    with suppress(LinkError):
                        await transport.establish()
                request = b""
                while b"\r\n\r\n" not in request:
                    await transport.wait_readable()
                    try:
                        request += transport.recv_nowait(65536) or b""
                    except LinkError:
                        break
                if request:
                    self.requests.append(request)
                # An asker that has seen enough leaves.
                with suppress(LinkError):
                    while reply:
                        reply = reply[transport.send_nowait(reply) :]
                        if reply:
                            await transport.wait_writable()
                transport.close()

        self.nursery.start_soon(run)


@pytest.fixture
def open_site():
    @asynccontextmanager
    async def do(**about):
        network = MemoryNetwork()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                checked: list[str] = []
                web = Web(dialer=network.dial, check=lambda url: checked.append(url.netloc), **about)
                site = Site(network, nursery)
                site.checked = checked
                yield site, web
                nursery.cancel_scope.cancel()

    return do


class TestBodies:
    async def test_a_body_of_a_stated_length(self, open_site):
        async with open_site() as (site, web):
            site.serve("o:80", answer(body=b"pixels"))
            assert await web.get("http://o/a/b.png?size=1#part", max_bytes=10) == b"pixels"
            assert site.requests[0].startswith(b"GET /a/b.png?size=1 HTTP/1.1\r\n")
            assert b"host: o\r\n" in site.requests[0].lower()

    async def test_a_body_in_pieces_and_one_that_ends_with_the_connection(self, open_site):
        async with open_site() as (site, web):
            chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            site.serve("o:80", chunked, b"HTTP/1.1 200 OK\r\n\r\nrest")
            assert await web.get("http://o/", max_bytes=10) == b"abcde"
            assert await web.get("http://o/", max_bytes=10) == b"rest"

    async def test_a_large_body(self, open_site):
        async with open_site() as (site, web):
            body = bytes(range(256)) * 4000
            site.serve("o:81", answer(body=body))
            assert await web.get("http://o:81/", max_bytes=len(body)) == body

    @pytest.mark.parametrize("stated", [True, False])
    async def test_one_over_the_limit_is_not_read_to_its_end(self, open_site, stated):
        async with open_site() as (site, web):
            body = b"x" * 1_000_000
            site.serve("o:80", answer(body=body) if stated else b"HTTP/1.1 200 OK\r\n\r\n" + body)
            with pytest.raises(BadRequest, match="more than 1000 bytes"):
                await web.get("http://o/", max_bytes=1000)

    async def test_spaces_and_foreign_letters_in_a_path_are_escaped(self, open_site):
        async with open_site() as (site, web):
            site.serve("o:80", answer(body=b"x"))
            await web.get("http://o/ein bild/größe%20.png", max_bytes=10)
            assert site.requests[0].startswith(b"GET /ein%20bild/gr%C3%B6%C3%9Fe%20.png HTTP")

    async def test_a_password_in_the_url_is_not_sent(self, open_site):
        async with open_site() as (site, web):
            site.serve("o:80", answer(body=b"x"))
            await web.get("http://me:secret@o/", max_bytes=10)
            assert b"secret" not in site.requests[0]


class TestTls:
    @pytest.fixture
    def authority(self):
        return trustme.CA()

    @pytest.fixture
    def certified(self, authority):
        def make(name):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(name).configure_cert(context)
            return context

        return make

    def trusting(self, web, authority):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return replace(web, trust=lambda: context)

    async def test_an_origin_that_proves_its_name_is_read(self, open_site, authority, certified):
        async with open_site() as (site, web):
            site.serve("o.test:443", answer(body=b"pixels"), tls=certified("o.test"))
            assert await self.trusting(web, authority).get("https://o.test/x", max_bytes=10) == b"pixels"

    async def test_one_with_another_name_is_not(self, open_site, authority, certified):
        async with open_site() as (site, web):
            site.serve("o.test:443", answer(body=b"pixels"), tls=certified("p.test"))
            with pytest.raises(MediaUnavailable, match="TLS handshake"):
                await self.trusting(web, authority).get("https://o.test/x", max_bytes=10)
            assert site.requests == []

    async def test_nor_one_of_an_authority_that_nobody_knows(self, open_site, certified):
        async with open_site() as (site, web):
            site.serve("o.test:443", answer(body=b"pixels"), tls=certified("o.test"))
            with pytest.raises(MediaUnavailable, match="TLS handshake"):
                await web.get("https://o.test/x", max_bytes=10)
            assert site.requests == []


class TestRedirects:
    async def test_they_are_followed_and_every_host_is_checked(self, open_site):
        async with open_site() as (site, web):
            site.serve("a:80", answer("302 Found", location="http://b:8080/x"))
            site.serve("b:8080", answer("307 Temporary Redirect", location="/y"), answer(body=b"there"))
            assert await web.get("http://a/", max_bytes=10) == b"there"
            assert site.checked == ["a", "b:8080", "b:8080"]
            assert site.requests[2].startswith(b"GET /y ")

    async def test_a_host_that_may_not_be_asked_is_not(self, open_site):
        async with open_site() as (site, web):
            site.serve("a:80", answer("302 Found", location="http://inside/"))

            def check(url):
                if url.hostname == "inside":
                    raise BadRequest("not that one")

            with pytest.raises(BadRequest, match="not that one"):
                await Web(dialer=web.dialer, check=check).get("http://a/", max_bytes=10)

    async def test_there_is_an_end_of_them(self, open_site):
        async with open_site(max_redirects=2) as (site, web):
            site.serve("a:80", *[answer("301 Moved", location="/again")] * 3)
            with pytest.raises(BadRequest, match="more than 2 redirects"):
                await web.get("http://a/", max_bytes=10)
            assert len(site.requests) == 3

    @pytest.mark.parametrize("location", ["file:///etc/passwd", "gopher://x/", "https://"])
    async def test_they_lead_to_the_web_only(self, open_site, location):
        async with open_site() as (site, web):
            site.serve("a:80", answer("302 Found", location=location))
            with pytest.raises(BadRequest, match="malformed URL"):
                await web.get("http://a/", max_bytes=10)

    @pytest.mark.parametrize("location", ["http://[bad", "http://[::1/x", "//[v1.a/", "http://b:port/"])
    async def test_one_to_nowhere_that_can_be_parsed_is_nobodys_bug(self, open_site, location):
        async with open_site() as (site, web):
            site.serve("a:80", answer("302 Found", location=location))
            with pytest.raises(BadRequest, match="malformed URL"):
                await web.get("http://a/", max_bytes=10)


class TestFailures:
    @pytest.mark.parametrize("status", ["400 Bad", "401 No", "403 No", "404 Not Found", "410 Gone", "304 Same"])
    async def test_the_client_is_to_blame_for(self, open_site, status):
        async with open_site() as (site, web):
            site.serve("o:80", answer(status))
            with pytest.raises(BadRequest, match=f"answered with {status[:3]}"):
                await web.get("http://o/", max_bytes=10)

    @pytest.mark.parametrize("status", ["408 Timeout", "429 Slow Down", "500 Oops", "502 Bad", "503 Later"])
    async def test_another_try_may_help_against(self, open_site, status):
        async with open_site() as (site, web):
            site.serve("o:80", answer(status))
            with pytest.raises(MediaUnavailable, match=f"answered with {status[:3]}"):
                await web.get("http://o/", max_bytes=10)

    @pytest.mark.parametrize(
        "reply", [b"", b"SSH-2.0-OpenSSH\r\n", answer(body=b"abc")[:-1]], ids=["nothing", "something else", "half"]
    )
    async def test_an_origin_that_breaks_off_or_speaks_something_else(self, open_site, reply):
        async with open_site() as (site, web):
            site.serve("o:80", reply)
            with pytest.raises(MediaUnavailable, match="the origin"):
                await web.get("http://o/", max_bytes=10)

    @pytest.mark.parametrize(
        "reply",
        [b"hunter2 is my password\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nhunter2\r\n"],
        ids=["status line", "chunk"],
    )
    async def test_what_something_else_says_is_not_passed_on(self, open_site, reply):
        async with open_site() as (site, web):
            site.serve("o:80", reply)
            with pytest.raises(MediaUnavailable, match="does not answer in HTTP") as caught:
                await web.get("http://o/", max_bytes=10)
            assert "hunter2" not in caught.value.message

    async def test_an_origin_that_is_not_there(self, open_site):
        async with open_site() as (_site, web):
            with pytest.raises(MediaUnavailable, match="could not be reached"):
                await web.get("http://o/", max_bytes=10)

    @pytest.mark.parametrize("url", ["http:///x", "http://o:port/", "http://[::1/", "o/x", "http://o:0/", "ftp://o/"])
    async def test_a_malformed_url_is_the_clients(self, open_site, url):
        async with open_site() as (_site, web):
            with pytest.raises(BadRequest, match="malformed URL"):
                await web.get(url, max_bytes=10)
