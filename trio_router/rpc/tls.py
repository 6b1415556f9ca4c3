"""Whom to trust and what to show: TLS settings of clients and servers, and the contexts made from their files.

Files are read when a context is made and at no other time; connections keep the context they began with.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from ..errors import ConfigError, LinkError
from .tlstransport import ALPN_H2, TlsTransport
from .transport import Dialer, Listener, Transport, host_of

TLS12_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: what RFC 9113 appendix A leaves of Python's defaults. TLS 1.3 has no weak ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """How to speak TLS to a server. Files are in PEM.

    `ca_file` says whose certificates are trusted (None: the system's authorities). `cert_file` and `key_file` are for
    servers that ask for a certificate. `server_name` is what the server's certificate must be for, and the authority
    of the calls (None: the host that is dialed).
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    def validate(self) -> None:
        """Raise ConfigError, naming the file, when connections could not be made with these."""
        if (self.cert_file is None) is not (self.key_file is None):
            raise ConfigError("a TLS client certificate needs both its certificate file and its key file")
        if self.server_name == "":
            raise ConfigError("the TLS server name is empty")
        self.context()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection: the same one until a file has changed. Raises ConfigError."""
        files = (self.ca_file, self.cert_file, self.key_file)
        return _client_context(*files, tuple(_stamp(file) for file in files))

    def dialer(self, below: Dialer) -> Dialer:
        """Dials as `below` does and shakes hands."""

        async def dial(address: str) -> Transport:
            transport = await below(address)
            try:
                return await self._establish(transport, address)
            except BaseException:
                transport.close()
                raise

        return dial

    async def _establish(self, below: Transport, address: str) -> Transport:
        try:
            context = self.context()
        except ConfigError as exc:
            raise LinkError(f"cannot connect to {address}: {exc.message}") from exc
        transport = TlsTransport(below, context, server_name=self.server_name or host_of(address))
        await transport.establish()
        return transport


class ServerTls:
    """How to serve TLS, on any number of listeners. Files are in PEM.

    `cert_file` begins with the server's own certificate, its chain follows. With `client_ca_file` a client must show
    a certificate that one of these authorities has signed.
    """

    def __init__(self, *, cert_file: Path, key_file: Path, client_ca_file: Path | None = None) -> None:
        """Raises ConfigError, naming the file, when one cannot be used."""
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._context = self._load()

    def __repr__(self) -> str:
        return f"<ServerTls {self._cert_file}{'' if self._client_ca_file is None else ', clients need a certificate'}>"

    def reload(self) -> None:
        """Read the files again, for handshakes from now on. Raises ConfigError and goes on as before when they cannot
        be used. Connections that stand are not touched.
        """
        self._context = self._load()

    def wrap(self, below: Transport) -> TlsTransport:
        """The server's end of a connection, to be established."""
        return TlsTransport(below, self._context, server_side=True)

    def listen(self, below: Listener) -> TlsListener:
        """Speak TLS to whoever comes to `below`, which is closed with the listener returned."""
        return TlsListener(below, tls=self)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _restrict(context)
        # Tickets are for clients that come often. A channel comes once and stays.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        _show(context, self._cert_file, key_file=self._key_file)
        if self._client_ca_file is not None:
            _trust(context, self._client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class TlsListener:
    """A listener whose transports speak TLS. The handshake is left to who accepts: it may take long, or for ever."""

    __slots__ = ("_below", "_tls", "address")

    def __init__(self, below: Listener, *, tls: ServerTls) -> None:
        self.address = below.address
        self._below = below
        self._tls = tls

    def __repr__(self) -> str:
        return f"<TlsListener {self.address}>"

    async def accept(self) -> Transport:
        return self._tls.wrap(await self._below.accept())

    def close(self) -> None:
        self._below.close()


def _stamp(file: Path | None) -> tuple[int, int] | None:
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError as exc:
        raise ConfigError(f"TLS file {file}: {exc.strerror}") from exc
    return status.st_mtime_ns, status.st_ino


# A fleet's channels share one context, and a renewed certificate is taken at the next dial: the stamps are in the key.
@lru_cache(maxsize=16)
def _client_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None, _stamps: tuple[tuple[int, int] | None, ...]
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _restrict(context)
    if ca_file is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _trust(context, ca_file)
    if cert_file is not None and key_file is not None:
        _show(context, cert_file, key_file=key_file)
    return context


def _restrict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(TLS12_CIPHERS)
    # RFC 9113 section 9.2.1 forbids it.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN_H2])


def _trust(context: ssl.SSLContext, file: Path) -> None:
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as exc:
        raise ConfigError(f"TLS file {file} has no certificates of authorities in PEM") from exc
    except OSError as exc:
        raise ConfigError(f"TLS file {file}: {exc.strerror}") from exc


def _show(context: ssl.SSLContext, cert_file: Path, *, key_file: Path) -> None:
    def no_password() -> str:
        # Python would ask for it on the terminal.
        raise ConfigError(f"TLS file {key_file} is encrypted; give a key without a password")

    for file in (cert_file, key_file):
        _stamp(file)  # OpenSSL does not say which of the two it could not find
    try:
        context.load_cert_chain(cert_file, key_file, password=no_password)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"TLS file {key_file} is not the key of the certificate in {cert_file}") from exc
        raise ConfigError(f"TLS files {cert_file} and {key_file} are not a certificate and a key in PEM") from exc
    except OSError as exc:
        raise ConfigError(f"TLS files {cert_file} and {key_file}: {exc.strerror}") from exc
