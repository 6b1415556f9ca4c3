"""What leaves a connection: finished frames in order, and the streams whose DATA waits for credit or room.

Responsible for the order of output, the connection's send window, and sharing it fairly: queued DATA leaves in
frames of at most 16 KiB, one per stream in turn. Must not know what the peer sends, nor why a stream ends.

Header blocks enter the compression state when they enter the output, and what has entered it always leaves,
whatever happens to the stream: otherwise the peer's table would drift from ours (RFC 9113 4.3). Trailers behind
queued data are therefore kept unencoded until their turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from trio_router.http2 import credit, frames
from trio_router.http2.framing import PREFIX_BYTES, row
from trio_router.http2.headers import HeaderEncoder
from trio_router.http2.streams import Stream
from trio_router.pieces import Message

# How much of messages may go straight into the output between two takes; behind a transport that blocks they queue
# per stream, where they take turns and where their sender can see them. As much as one take hands over by default.
DIRECT_LIMIT_BYTES: Final = 262_144


class Outbox:
    """The output of one connection.

    The connection's send window is kept in two parts whose sum it is: `direct` is set aside for messages that go
    straight into `parts` (the sender lowers it, and nothing else, for each), the rest is for queued data.

    `unread` counts the bytes in `parts`, but not those messages: they have their bound in `direct`.
    """

    __slots__ = ("_drained", "_encoder", "_on_ended", "_rest", "_ring", "direct", "parts", "unread")

    def __init__(self, *, encoder: HeaderEncoder, on_ended: Callable[[Stream], None]) -> None:
        self.parts: list[bytes | memoryview] = []
        self.direct = frames.DEFAULT_WINDOW
        self.unread = 0
        self._rest = 0
        self._encoder = encoder
        self._on_ended = on_ended
        # Streams with queued bytes and a positive window of their own, in the order of their turns.
        self._ring: OrderedDict[int, Stream] = OrderedDict()
        self._drained: dict[int, Stream] = {}

    @property
    def pending(self) -> bool:
        """Whether `take` would return anything now."""
        return bool(self.parts) or (bool(self._ring) and self.window > 0)

    @property
    def window(self) -> int:
        """What the peer lets this connection send in all."""
        return self._rest + self.direct

    def grow(self, increment: int) -> bool:
        """The peer gave connection credit; False if that is more than a window can be."""
        if credit.grown(self.window, increment) is None:
            return False
        self._rest += increment
        return True

    def add(self, frame: bytes) -> None:
        """Append a finished frame."""
        self.parts.append(frame)
        self.unread += len(frame)

    def add_headers(self, stream: Stream, headers: list[tuple[bytes, bytes]], *, end_stream: bool) -> None:
        """Encode a header list and append it."""
        self.add(frames.header_frames(stream.id, self._encoder.encode(headers), end_stream=end_stream))

    def enqueue(self, stream: Stream, messages: Sequence[Message]) -> None:
        """Keep messages until both windows and the output have room for them."""
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.extend(row(messages))
        stream.queued_bytes += sum(map(len, messages)) + PREFIX_BYTES * len(messages)
        stream.flowing = False
        self.update(stream)

    def update(self, stream: Stream) -> None:
        """The stream's window or queue has changed: it takes turns exactly while it has both."""
        if stream.queued_bytes and stream.send_window > 0:
            self._ring[stream.id] = stream
        else:
            self._ring.pop(stream.id, None)

    def drop(self, stream: Stream) -> None:
        """Forget what a stream that is over has queued.

        `take_drained` does not tell: who has the stream sees it closed, and a list of such streams would grow with
        every request of a peer that resets them and does not read.
        """
        stream.queue = None
        stream.queued_bytes = 0
        stream.ending = None
        self._ring.pop(stream.id, None)

    def take_drained(self) -> list[Stream]:
        """Streams whose queue has become empty because all of it was taken, since the last call."""
        drained = list(self._drained.values())
        self._drained.clear()
        return drained

    def take(self, max_bytes: int) -> bytes:
        """The next bytes for the transport, at most `max_bytes`; they may end anywhere, even inside a frame."""
        rest = self._rest = self._rest + self.direct
        limit = DIRECT_LIMIT_BYTES
        if self._ring:
            self._pump(max_bytes)
            rest = self._rest
            # Whoever waits in the ring has most of the next output, however much is sent directly.
            limit = max_bytes // 4
        self.direct = direct = rest if rest < limit else limit
        self._rest = rest - direct
        output = b"".join(self.parts)
        self.parts = []
        self.unread = 0
        if len(output) > max_bytes:
            self.add(output[max_bytes:])
            output = output[:max_bytes]
        return output

    def _pump(self, max_bytes: int) -> None:
        """Move queued DATA into the output, a frame per stream and turn, until credit or `max_bytes` run out."""
        ring = self._ring
        room = max_bytes - sum(map(len, self.parts))
        while ring and self._rest > 0 and room > 0:
            stream = next(iter(ring.values()))
            length = min(frames.SEND_FRAME_BYTES, stream.queued_bytes, stream.send_window, self._rest)
            self._emit(stream, length)
            room -= frames.FRAME_HEADER.size + length
            self.update(stream)
            if stream.id in ring:
                ring.move_to_end(stream.id)

    def _emit(self, stream: Stream, length: int) -> None:
        """One DATA frame of `length` queued bytes, and behind the last one whatever ends the stream."""
        ending = stream.ending
        last = length == stream.queued_bytes
        self.add(frames.data_header(stream.id, length, end_stream=last and ending == []))
        self.parts += _cut(stream.queue, length) if stream.queue else ()
        self._rest -= length
        stream.send_window -= length
        stream.queued_bytes -= length
        if last:
            self._set_drained(stream)
            if ending:
                self.add_headers(stream, ending, end_stream=True)
            if ending is not None:
                stream.ending = None
                self._on_ended(stream)

    def _set_drained(self, stream: Stream) -> None:
        stream.queue = None
        stream.queued_bytes = 0
        stream.flowing = stream.sendable
        self.update(stream)
        self._drained[stream.id] = stream


def _cut(queue: deque[bytes | memoryview], length: int) -> list[bytes | memoryview]:
    """Take exactly `length` bytes from the front of a queue that has them."""
    pieces: list[bytes | memoryview] = []
    while length:
        piece = queue.popleft()
        if len(piece) > length:
            view = memoryview(piece)
            queue.appendleft(view[length:])
            piece = view[:length]
        pieces.append(piece)
        length -= len(piece)
    return pieces
