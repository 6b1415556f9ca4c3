"""TLS on any transport: `ssl.MemoryBIO` in the middle, so that reading and writing stay synchronous.

The handshake is the one thing that waits (`establish`); after it a record is encrypted and handed to the transport
below in the same call. It knows nothing of what is carried, nor where certificates come from; ALPN is the only thing
it insists on (RFC 9113 section 3.2).
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Final

import trio

from ..errors import LinkError
from .transport import Transport

ALPN_H2: Final = "h2"

RECORD_BYTES: Final = 16_384
"""Plain bytes of the largest record (RFC 8446 section 5.1), and so the most that a full pipe leaves with us. More in a
write saves nothing that could be measured (bench/tls.py)."""

PARTING_TIME: Final = 1.0
"""Seconds a peer gets to read why its handshake failed, before the connection is closed."""

_RECV_BYTES: Final = 262_144
# Bytes that may be read to no purpose: in one call, with only messages of TLS itself in them; or while parting.
_IDLE_BYTES: Final = _RECV_BYTES

_CERTIFICATE_REASONS: Final = {
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: "its certificate is signed by itself and not trusted here",
    19: "its certificate comes from an authority that is not trusted here",
    20: "its certificate comes from an authority that is not trusted here",
    21: "its certificate comes from an authority that is not trusted here",
    23: "its certificate has been revoked",
}
"""By X509_V_ERR number, which Python and OpenSSL agree on; other numbers are worded by OpenSSL."""

_PLAIN: Final = "it does not speak TLS; is it a plaintext port or client?"
_REFUSED: Final = "it refused our certificate"
_HUNG_UP: Final = (
    "closed the connection before its first word; it may want another certificate than we show, or one at all"
)
_REASONS: Final = {
    "HTTP_REQUEST": _PLAIN,
    "HTTPS_PROXY_REQUEST": _PLAIN,
    "WRONG_VERSION_NUMBER": _PLAIN,
    "UNSUPPORTED_PROTOCOL": "no version of TLS in common",
    "TLSV1_ALERT_PROTOCOL_VERSION": "no version of TLS in common",
    "NO_SHARED_CIPHER": "no cipher in common",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate, and one is required",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate, and we showed none",
    "TLSV1_ALERT_UNKNOWN_CA": f"{_REFUSED}: its authority is not trusted there",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": f"{_REFUSED}: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": f"{_REFUSED}: it is not valid for this name or now",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": f"{_REFUSED}: it has been revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _REFUSED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _REFUSED,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refused the handshake; it may want a certificate, or other ciphers",
    "TLSV1_UNRECOGNIZED_NAME": "it does not know the server name that was asked for",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "it does not offer HTTP/2 (ALPN h2)",
}
"""By OpenSSL's name of the error. Alerts are what the peer says of us; everything else we say of the peer."""


class TlsTransport:
    """A transport whose bytes go encrypted over the one below. `establish` comes first; nothing works before.

    `server_name` (clients only) is what the peer's certificate must be valid for; `protocol` is what the peer must
    choose by ALPN, None where that is nobody's business. A record is reported as sent once all of its ciphertext has
    left. So bytes that were not taken must be offered again first and unchanged: they may have been encrypted already.
    """

    __slots__ = (
        "_below", "_ciphertext", "_closed", "_ended", "_failure", "_incoming", "_outgoing", "_owed", "_protocol",
        "_tls", "_unheard", "peer",
    )  # fmt: skip

    def __init__(
        self,
        below: Transport,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_name: str | None = None,
        protocol: str | None = ALPN_H2,
    ) -> None:
        self.peer = below.peer
        self._protocol = protocol
        self._below = below
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        try:
            self._tls = context.wrap_bio(
                self._incoming, self._outgoing, server_side=server_side, server_hostname=server_name
            )
        except ValueError as exc:  # UnicodeError is one, too
            raise LinkError(f"{server_name!r} is no name that a certificate could be for") from exc
        self._ciphertext = b""
        self._owed = 0  # plain bytes of the record whose ciphertext waits: not reported as sent
        self._ended = False
        # Nothing has been read yet. In TLS 1.3 a client hears what the server makes of its certificate only afterwards.
        self._unheard = not server_side
        self._failure: LinkError | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._tls.version() or "no handshake yet"
        return f"<TlsTransport {state} on {self._below!r}>"

    async def establish(self) -> None:
        """Shake hands. Raises LinkError when the peer leaves, does not prove who it is, or chooses another protocol."""
        await self._below.establish()
        try:
            await self._shake_hands()
        except ssl.SSLError as exc:
            await self._part()
            raise LinkError(f"TLS handshake with {self.peer} failed: {_reason(exc)}") from exc
        if self._protocol is not None and self._tls.selected_alpn_protocol() != self._protocol:
            raise LinkError(f"TLS handshake with {self.peer} failed: it does not offer HTTP/2 (ALPN {self._protocol})")

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        if self._closed:
            raise LinkError(f"TLS connection to {self.peer} is closed")
        idle_bytes = 0
        while True:
            data = self._decrypt(max_bytes)
            if data:
                self._unheard = False
                return data
            if self._ended:
                if self._unheard:
                    raise LinkError(f"{self.peer} {_HUNG_UP}")
                return b""
            if self._failure is not None:
                raise self._failure
            try:
                ciphertext = self._below.recv_nowait(_RECV_BYTES)
            except LinkError as exc:
                if self._unheard:
                    raise LinkError(f"{self.peer} {_HUNG_UP}") from exc
                raise
            idle_bytes += len(ciphertext or b"")
            if ciphertext == b"":
                # A cut without TLS's goodbye is for the protocol above to judge: HTTP/2 knows what is missing.
                self._ended = True
            elif ciphertext is None or idle_bytes > _IDLE_BYTES:
                return None
            else:
                self._incoming.write(ciphertext)

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        if not self._push():
            return 0
        offered = len(data)
        # The caller begins with what it was not told to have been taken: the record that was owed, which has left now.
        taken = min(self._owed, offered)
        self._owed -= taken
        with memoryview(data) as view:
            while taken < offered:
                plain = min(RECORD_BYTES, offered - taken)
                try:
                    self._tls.write(view[taken : taken + plain])
                except ssl.SSLError as exc:
                    raise LinkError(f"TLS with {self.peer} broke while writing: {_reason(exc)}") from exc
                if not self._push():
                    self._owed = plain
                    break
                taken += plain
        return taken

    async def wait_readable(self) -> None:
        if self._closed or not self._has_something():
            await self._below.wait_readable()
        else:
            await trio.lowlevel.checkpoint()

    async def wait_writable(self) -> None:
        await self._below.wait_writable()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # The goodbye, as far as it goes without waiting (RFC 8446 section 6.1).
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            with suppress(LinkError):
                self._push()
        self._below.close()

    async def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._push_all()
                await self._fill()
            else:
                await self._push_all()
                return

    async def _fill(self) -> None:
        """Wait for ciphertext. Raises LinkError when there will be none."""
        while True:
            await self._below.wait_readable()
            ciphertext = self._below.recv_nowait(_RECV_BYTES)
            if ciphertext:
                self._incoming.write(ciphertext)
                return
            if ciphertext is not None:
                raise LinkError(f"{self.peer} closed the connection during the TLS handshake")

    async def _part(self) -> None:
        """Send the alert that says why, and wait until the peer has left over it: a socket that is closed with unread
        bytes in it destroys what is on its way to the peer.
        """
        with trio.move_on_after(PARTING_TIME), suppress(LinkError):
            await self._push_all()
            left = _IDLE_BYTES
            while left > 0 and (data := self._below.recv_nowait(_RECV_BYTES)) != b"":
                left -= len(data or b"")
                await self._below.wait_readable()

    def _has_something(self) -> bool:
        return bool(self._tls.pending() or self._incoming.pending or self._ended or self._failure)

    def _decrypt(self, max_bytes: int) -> bytes:
        """What the ciphertext that is here has in it. What went wrong after that is told the next time."""
        pieces: list[bytes] = []
        room = max_bytes
        tls, incoming = self._tls, self._incoming
        try:
            # OpenSSL keeps a record that is not complete yet, so that both counts are zero when it needs more.
            while room > 0 and not self._ended and (incoming.pending or tls.pending()):
                piece = tls.read(min(room, RECORD_BYTES))
                pieces.append(piece)
                room -= len(piece)
                self._ended = not piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as exc:
            self._failure = LinkError(f"TLS with {self.peer} broke while reading: {_reason(exc)}")
            self._failure.__cause__ = exc
        if self._outgoing.pending:
            # Answers of TLS itself. If they cannot be written, the next write says so.
            with suppress(LinkError):
                self._push()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _push(self) -> bool:
        """Hand ciphertext down; False when some has to wait."""
        if self._outgoing.pending:
            fresh = self._outgoing.read()
            self._ciphertext = self._ciphertext + fresh if self._ciphertext else fresh
        if self._ciphertext:
            self._ciphertext = self._ciphertext[self._below.send_nowait(self._ciphertext) :]
        return not self._ciphertext

    async def _push_all(self) -> None:
        while not self._push():
            await self._below.wait_writable()


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        text: str = error.verify_message
        return _CERTIFICATE_REASONS.get(error.verify_code) or text[:1].lower() + text[1:].rstrip(".")
    return _REASONS.get(error.reason or "") or str(error.reason or error).lower().replace("_", " ")
