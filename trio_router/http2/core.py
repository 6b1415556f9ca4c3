"""The books of one connection, shared by its receiving and its sending half.

Responsible for which streams exist, how they end, and the flow-control balance of what was received. Must not
know how frames look when they arrive (`inbound`) nor what callers may ask for (`connection`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2 import credit, frames
from trio_router.http2.frames import ErrorCode
from trio_router.http2.framing import PREFIX_BYTES
from trio_router.http2.headers import HeaderEncoder
from trio_router.http2.limits import Clock, Patience, no_clock
from trio_router.http2.loans import Loans
from trio_router.http2.outbox import Outbox
from trio_router.http2.settings import Http2Settings, PeerSettings, SettingId
from trio_router.http2.streams import RULES, Input, Role, Rule, State, Stream

# Enough to explain, too little to fill memory.
MAX_DEBUG_BYTES: Final = 256
# The PING whose answer shows that the peer has read the first GOAWAY of a drain (RFC 9113 6.8).
DRAIN_PING: Final = b"drained?"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoAway:
    """A GOAWAY frame that came; `code` may be any number."""

    last_stream_id: int
    code: int
    debug: bytes


class Core:
    """What both halves of a connection read and change."""

    __slots__ = (
        "batch",
        "credit_mark",
        "draining",
        "encoder",
        "error",
        "goaway_received",
        "last_peer_id",
        "loans",
        "lost",
        "next_id",
        "outbox",
        "patience",
        "peer",
        "pings_acked",
        "pings_out",
        "pings_received",
        "receive_window",
        "refuse_above",
        "role",
        "settings",
        "stream_credit_mark",
        "streams",
        "touched",
        "uncredited",
    )

    def __init__(self, role: Role, *, settings: Http2Settings, clock: Clock = no_clock) -> None:
        self.role = role
        self.settings = settings
        self.peer = PeerSettings()
        self.error: ProtocolViolation | None = None
        self.lost = False
        self.goaway_received: GoAway | None = None
        self.refuse_above: int | None = None  # the last stream id of our own GOAWAY
        self.draining = False  # we have said that we are going away, and the peer may not have read it yet
        self.pings_out: list[bytes] = []
        self.pings_acked: list[bytes] = []
        self.pings_received = 0

        self.streams: dict[int, Stream] = {}
        self.next_id = 1
        self.last_peer_id = 0
        self.touched: list[Stream] = []
        self.batch = 0

        self.encoder = HeaderEncoder()
        self.outbox = Outbox(encoder=self.encoder, on_ended=self.local_end)
        self.patience = Patience(clock)
        self.loans = Loans(limit=settings.max_unfinished_bytes)
        # Our INITIAL_WINDOW_SIZE binds the peer from its ACK on (RFC 9113 6.5.3); until then it may use the default.
        self.receive_window = frames.DEFAULT_WINDOW
        self.stream_credit_mark = self.receive_window // 2  # see `Stream.credit`
        # Received on the connection since its last WINDOW_UPDATE, and how much of it is worth the next one.
        self.uncredited = 0
        self.credit_mark = settings.connection_window_bytes // 2
        self._announce()

    def _announce(self) -> None:
        """The preface of either side (3.4): our settings, and the window that only a WINDOW_UPDATE can enlarge."""
        limits = self.settings
        values: dict[int, int] = {
            SettingId.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            SettingId.MAX_FRAME_SIZE: limits.max_frame_bytes,
            SettingId.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        if self.role is Role.CLIENT:
            self.outbox.add(frames.PREFACE)
            values[SettingId.ENABLE_PUSH] = 0
        else:
            values[SettingId.MAX_CONCURRENT_STREAMS] = limits.max_concurrent_streams
        self.outbox.add(frames.settings(values))
        if limits.connection_window_bytes > frames.DEFAULT_WINDOW:
            self.outbox.add(frames.window_update(0, limits.connection_window_bytes - frames.DEFAULT_WINDOW))

    # -- streams

    def new_stream(self, stream_id: int, *, state: State) -> Stream:
        """Enter a stream into the books."""
        stream = self.streams[stream_id] = Stream(
            stream_id,
            core=self,
            state=state,
            receive_left=self.receive_window,
            send_window=self.peer.initial_window,
        )
        return stream

    def rule(self, stream: Stream | None, stream_id: int, event: Input) -> Rule:
        """What the table says to `event`. An id that is not in the books is idle or closed by its number alone."""
        if stream is not None:
            state = stream.state
        else:
            newest = self.next_id - 2 if self.role is Role.CLIENT else self.last_peer_id
            # Even ids never open: we push nothing and allow no push.
            state = State.CLOSED if stream_id & 1 and stream_id <= newest else State.IDLE
        return RULES[self.role, state, event]

    def touch(self, stream: Stream) -> None:
        """Report the stream at the end of this `receive`, once."""
        if stream.batch != self.batch:
            stream.batch = self.batch
            self.touched.append(stream)

    def remote_end(self, stream: Stream) -> None:
        """The peer's END_STREAM came."""
        stream.state = State.REMOTE_ENDED
        stream.plain = False
        stream.remote_ended = True
        if stream.content_left:
            self.fail_stream(stream, ProtocolViolation("fewer bytes came than content-length says"))
        elif stream.assembler is not None and stream.assembler.pending:
            self.fail_message(stream, ProtocolViolation("the stream ended inside a message"))
        elif stream.local_ended:
            self.close(stream)
        elif self.role is Role.CLIENT:
            self._end_early(stream)

    def local_end(self, stream: Stream) -> None:
        """Our END_STREAM has entered the output."""
        stream.local_ended = True
        stream.sendable = stream.flowing = False
        if stream.remote_ended:
            self.close(stream)
        elif self.role is Role.SERVER:
            self._end_early(stream)

    def _end_early(self, stream: Stream) -> None:
        """The response is complete and the request is not: nobody wants the rest of it (RFC 9113 8.1)."""
        self.reset(stream, code=ErrorCode.NO_ERROR)

    def fail_message(self, stream: Stream, error: ProtocolViolation | TooLarge) -> None:
        """The peer sent a message that cannot be read. A server's owner says so, which a reset could not."""
        if self.role is Role.CLIENT:
            self.fail_stream(stream, error)
            return
        stream.failure = error
        stream.plain = False
        stream.assembler = None
        if not stream.remote_ended:
            stream.state = State.DEAF
        self.settle(stream)
        self.touch(stream)
        self.patience.answer()  # which the owner will give

    def fail_stream(self, stream: Stream, error: ProtocolViolation | TooLarge) -> None:
        """The peer broke the rules on this stream alone."""
        stream.failure = error
        self.touch(stream)
        # ENHANCE_YOUR_CALM is what gRPC reads as RESOURCE_EXHAUSTED.
        self.reset(stream, code=error.h2_code if isinstance(error, ProtocolViolation) else ErrorCode.ENHANCE_YOUR_CALM)
        self.patience.answer()
        self.given_up(stream)

    def given_up(self, stream: Stream) -> None:
        """The peer has ended a stream before its time: by a reset, or by a frame that made us reset it."""
        if self.role is Role.SERVER and not stream.started:
            self.patience.unanswered_reset()

    def reset(self, stream: Stream, *, code: int) -> None:
        """End both sides now; RST_STREAM unless both had ended anyway."""
        if not (stream.local_ended and stream.remote_ended):
            self.outbox.add(frames.rst_stream(stream.id, code))
        self.close(stream)

    def close(self, stream: Stream) -> None:
        """Take a stream out of the books. Its messages stay readable."""
        stream.state = State.CLOSED
        stream.closed = True
        stream.plain = stream.sendable = stream.flowing = False
        stream.assembler = None
        self.outbox.drop(stream)
        self.settle(stream)
        self.streams.pop(stream.id, None)

    def answer(self, frame: bytes) -> None:
        """Send a frame that exists only because the peer sent one."""
        self.outbox.add(frame)
        self.patience.answer()

    # -- flow control of what we receive

    def set_receive_window(self, window: int) -> None:
        """From now on the peer may send `window` bytes of each stream on credit; open streams follow (6.9.2)."""
        change = window - self.receive_window
        self.receive_window = window
        self.stream_credit_mark = window // 2
        for stream in self.streams.values():
            stream.receive_left += change
            # What was buffered under a larger window may be owed now; a message that began before waited for ever else.
            self.lend_credit(stream)

    def return_credit(self, stream: Stream) -> None:
        """Give back what is owed to the stream's peer, if it is worth a frame. Unread messages owe nothing yet."""
        held = sum(map(len, stream.messages)) + PREFIX_BYTES * len(stream.messages)
        self._give_credit(stream, credit.due(window=self.receive_window, left=stream.receive_left, held=held))

    def lend_credit(self, stream: Stream) -> None:
        """The same for the bytes of an unfinished message, while no finished one waits: see the law in `credit`."""
        if not (stream.messages or stream.taken or stream.remote_ended):
            amount = credit.due(window=self.receive_window, left=stream.receive_left, held=0)
            if amount and self.loans.grant(stream, amount):
                self._give_credit(stream, amount)

    def settle(self, stream: Stream) -> None:
        """What was lent to the stream has been consumed or lost: others may borrow it."""
        if self.loans.lent:
            for other in self.loans.settle(stream):
                self.lend_credit(other)

    def _give_credit(self, stream: Stream, amount: int) -> None:
        if amount:
            stream.receive_left += amount
            self.outbox.add(frames.window_update(stream.id, amount))

    def return_connection_credit(self) -> None:
        """Give back what came on the connection, whoever it was for. Raises `ProtocolViolation` if it was too much."""
        window = self.settings.connection_window_bytes
        if self.uncredited > window:
            raise ProtocolViolation("DATA beyond the connection's window", h2_code=ErrorCode.FLOW_CONTROL_ERROR)
        amount = credit.due(window=window, left=window - self.uncredited, held=0)
        if amount:
            self.uncredited = 0
            self.outbox.add(frames.window_update(0, amount))

    # -- the end

    def fail(self, violation: ProtocolViolation) -> None:
        """A connection error (RFC 9113 5.4.1): everything is lost, and the peer is told why."""
        self.error = violation
        for stream in self.lose_all():
            self.touch(stream)
        self.go_away(violation.h2_code, debug=violation.message.encode())

    def drain(self, *, debug: bytes) -> None:
        """Say that we are going away, and go on serving until the peer has shown that it has read it (6.8)."""
        if self.refuse_above is None and not self.draining:
            self.draining = True
            self.outbox.add(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR, debug[:MAX_DEBUG_BYTES]))
            self.outbox.add(frames.ping(DRAIN_PING, ack=False))

    def go_away(self, code: int, *, debug: bytes) -> None:
        """Send a GOAWAY, and refuse streams above its last id from then on. A second one never raises that id (6.8)."""
        self.draining = False
        if self.refuse_above is None:
            self.refuse_above = self.last_peer_id
        self.outbox.add(frames.goaway(self.refuse_above, code, debug[:MAX_DEBUG_BYTES]))

    def lose_all(self) -> list[Stream]:
        """Every open stream becomes lost and closed."""
        streams = list(self.streams.values())
        for stream in streams:
            self.loans.settle(stream)  # before any is closed: nobody is to borrow what is lost
        for stream in streams:
            stream.lost = True
            self.close(stream)
        return streams
