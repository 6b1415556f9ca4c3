"""The rest of an answer whose handler has gone: it waits for its client, but not for ever.

A call ends when its handler returns. What the client has not given credit for by then stays queued on the stream, which
counts among those the client may have open, and nobody is left who would notice that it is never read.
"""

from __future__ import annotations

import trio

from ..http2.frames import ErrorCode
from ..http2.streams import Stream
from .link import Flush, Link


class Remainder:
    """Owns a stream from its handler's end to its own. The stream is reset once its client takes none of it for
    `timeout` seconds.
    """

    __slots__ = ("_link", "_stream", "_timeout", "_unread")

    def __init__(self, link: Link, stream: Stream, *, timeout: float) -> None:
        self._link = link
        self._stream = stream
        self._timeout = timeout
        self._unread = 0  # bytes, when the present patience began
        stream.user = self
        link.when_drained(self, stream)
        self._watch()

    def _watch(self) -> None:
        self._unread = self._stream.queued_bytes
        self._link.watch(self, deadline=trio.current_time() + self._timeout)

    # StreamOwner

    def touched(self, flushes: dict[Flush, None]) -> None:
        if self._stream.closed:
            self._link.forget(self)

    def drained(self) -> None:
        self._link.forget(self)

    def flush_failed(self, flush: Flush, error: Exception) -> None:
        """Never asked for."""

    def expired(self) -> None:
        if self._stream.queued_bytes < self._unread:
            self._watch()
            return
        self._link.forget(self)
        self._link.connection.reset(self._stream, ErrorCode.CANCEL)
        self._link.flush()
