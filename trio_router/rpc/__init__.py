"""gRPC on trio: transports, links, calls, channels and servers. Knows nothing of workers, legs or tokens.

The public names are re-exported here; `docs/grpc-on-trio.md` is their manual.
"""

from ..errors import LinkError
from ..http2.settings import Http2Settings
from .backoff import BackoffSettings
from .call import ClientCall, Sink
from .channel import Channel, connect_channel, open_channel
from .endpoint import dial, listen
from .keepalive import KeepaliveSettings, PingLimits
from .links import ChannelSettings, ChannelState, StateChange
from .memory import MemoryNetwork, memory_link
from .metadata import Origin, RpcError
from .server import RawHandler, Server, ServerSettings
from .servercall import ServerCall
from .tls import ClientTls, ServerTls
from .transport import Dialer, Listener, Transport, dial_tcp, open_tcp_listener

__all__ = [
    "BackoffSettings",
    "Channel",
    "ChannelSettings",
    "ChannelState",
    "ClientCall",
    "ClientTls",
    "Dialer",
    "Http2Settings",
    "KeepaliveSettings",
    "LinkError",
    "Listener",
    "MemoryNetwork",
    "Origin",
    "PingLimits",
    "RawHandler",
    "RpcError",
    "Server",
    "ServerCall",
    "ServerSettings",
    "ServerTls",
    "Sink",
    "StateChange",
    "Transport",
    "connect_channel",
    "dial",
    "dial_tcp",
    "listen",
    "memory_link",
    "open_channel",
    "open_tcp_listener",
]
