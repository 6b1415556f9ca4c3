"""One GET over HTTP/1.1, as media are fetched: bounded, redirects followed and each of them checked.

It speaks on transports of a Dialer, so that origins may be on memory links. It must not know media, nor keep a
connection. Who calls owns the deadline.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import h11

from ...errors import BadRequest, LinkError, WorkerUnavailable
from ...rpc.tlstransport import TlsTransport
from ...rpc.transport import Dialer, Transport

READ_BYTES: Final = 65_536
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_TRANSIENT: Final = frozenset({408, 429})
"""Of the answers that blame the client, those that another try may change."""
_SAFE: Final = "/%:=&?~#+!$,;'@()*[]"
USER_AGENT: Final = b"trio-router-worker"


class MediaUnavailable(WorkerUnavailable):
    """Media could not be had now; another try may succeed."""

    code = "media_fetch_failed"


@cache
def usual_trust() -> ssl.SSLContext:
    """The system's authorities."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True, kw_only=True)
class Web:
    """How to get at origins. `check` gets every URL that is about to be asked, and raises BadRequest."""

    dialer: Dialer
    check: Callable[[SplitResult], None]
    max_redirects: int = 5
    trust: Callable[[], ssl.SSLContext] = usual_trust
    """Whose certificates are believed; asked for at the first https: URL."""

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        """The body that a URL leads to. Raises BadRequest when asking again is no use, MediaUnavailable when it is.

        Neither quotes the URL.
        """
        for _hop in range(self.max_redirects + 1):
            target = _split(url)
            self.check(target)
            answer = await self._ask(target, max_bytes=max_bytes)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer)
            except ValueError as exc:
                raise BadRequest("the origin redirects to a malformed URL") from exc
        raise BadRequest(f"more than {self.max_redirects} redirects")

    async def _ask(self, target: SplitResult, *, max_bytes: int) -> bytes | str:
        """The body, or where it is said to be instead."""
        host, secure = target.hostname or "", target.scheme == "https"
        port = target.port or _PORTS[target.scheme]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        transport: Transport | None = None
        try:
            transport = await self.dialer(address)
            if secure:
                transport = TlsTransport(transport, self.trust(), server_name=host, protocol=None)
                await transport.establish()
            return await _exchange(transport, target, max_bytes=max_bytes)
        except LinkError as exc:
            raise MediaUnavailable(f"the origin could not be reached, or broke off: {exc.message}") from exc
        except h11.RemoteProtocolError as exc:
            # Its own words may be those of a service behind the wall, which a redirect has led to.
            raise MediaUnavailable("the origin does not answer in HTTP/1.1, or broke off") from exc
        finally:
            if transport is not None:
                transport.close()


def _split(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        port = target.port
    except ValueError as exc:
        raise BadRequest("malformed URL") from exc
    if target.scheme not in _PORTS or not target.hostname or port == 0:
        raise BadRequest("malformed URL: http:// or https:// and a host are needed")
    return target


async def _exchange(transport: Transport, target: SplitResult, *, max_bytes: int) -> bytes | str:
    connection = h11.Connection(h11.CLIENT)
    try:
        request = connection.send(_request(target)) or b""
    except (h11.LocalProtocolError, UnicodeError) as exc:
        raise BadRequest("malformed URL") from exc
    await _send_all(transport, request + (connection.send(h11.EndOfMessage()) or b""))
    pieces: list[bytes] = []
    size = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await _receive(transport))
        elif isinstance(event, h11.Response):
            redirect = _judge(event, max_bytes=max_bytes)
            if redirect is not None:
                return redirect
        elif isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
            size += len(event.data)
            if size > max_bytes:
                raise _too_large(max_bytes)
        elif isinstance(event, h11.EndOfMessage):
            return b"".join(pieces)


def _request(target: SplitResult) -> h11.Request:
    path = quote(target.path or "/", safe=_SAFE) + (f"?{quote(target.query, safe=_SAFE)}" if target.query else "")
    # A user and a password in a URL are left out.
    host = target.netloc.rpartition("@")[2]
    headers = [
        (b"Host", host.encode("ascii" if host.isascii() else "idna")),
        (b"User-Agent", USER_AGENT),
        (b"Accept-Encoding", b"identity"),
        (b"Connection", b"close"),
    ]
    return h11.Request(method=b"GET", target=path.encode("ascii"), headers=headers)


def _judge(response: h11.Response, *, max_bytes: int) -> str | None:
    """None for an answer to read on, or where it points to."""
    status = response.status_code
    told = {name: value for name, value in response.headers if name in (b"location", b"content-length")}
    if status in _REDIRECTS and b"location" in told:
        return told[b"location"].decode("ascii", "replace")
    if status >= 500 or status in _TRANSIENT:
        raise MediaUnavailable(f"the origin answered with {status}")
    if not 200 <= status < 300:
        raise BadRequest(f"the origin answered with {status}")
    if int(told.get(b"content-length", b"0")) > max_bytes:
        raise _too_large(max_bytes)
    return None


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the item has more than {limit} bytes, which is the limit")


async def _send_all(transport: Transport, data: bytes) -> None:
    while data:
        sent = transport.send_nowait(data)
        data = data[sent:]
        if data:
            await transport.wait_writable()


async def _receive(transport: Transport) -> bytes:
    while True:
        data = transport.recv_nowait(READ_BYTES)
        if data is not None:
            return data
        await transport.wait_readable()
