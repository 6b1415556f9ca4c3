"""Addresses as people write them: `host:port`, `[v6]:port`, `unix:path`, `unix:///path`. To dial, and to listen on."""

from __future__ import annotations

from ..offload import Offload
from .resolve import resolver_threads
from .transport import UNIX_SCHEME, Listener, Transport, dial_tcp, open_tcp_listener, split_address
from .unix import OWNER_ONLY, dial_unix, open_unix_listener, split_unix_address


async def dial(address: str, *, offload: Offload = resolver_threads) -> Transport:
    """Connect to an address; the Dialer of this machine's network. Raises LinkError with the reason.

    Names are resolved through `offload`.
    """
    if address.startswith(UNIX_SCHEME):
        return await dial_unix(address)
    return await dial_tcp(address, offload=offload)


async def listen(address: str, *, offload: Offload = resolver_threads, mode: int = OWNER_ONLY) -> Listener:
    """Listen on an address; `mode` is for UNIX sockets: their permissions.

    Raises LinkError when it is none, OSError (UnicodeError for a strange host name) when it cannot be had.
    """
    if address.startswith(UNIX_SCHEME):
        return open_unix_listener(split_unix_address(address), mode=mode)
    host, port = split_address(address)
    return await open_tcp_listener(host, port=port, offload=offload)
