"""HTTP/2 for gRPC as a value: bytes in, streams and messages out, with no socket, clock or task in sight.

The public names are re-exported here. Responsible for RFC 9113 framing, header blocks, flow control, stream
states and the gRPC length prefix; must not know transports, deadlines, statuses, metadata or anything above a
message's bytes.
"""

from __future__ import annotations

from trio_router.http2.connection import Connection
from trio_router.http2.core import GoAway
from trio_router.http2.frames import ErrorCode
from trio_router.http2.headers import Headers
from trio_router.http2.settings import Http2Settings
from trio_router.http2.streams import Role, Stream

__all__ = ["Connection", "ErrorCode", "GoAway", "Headers", "Http2Settings", "Role", "Stream"]
