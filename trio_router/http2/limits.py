"""How much a peer may make us do for nothing before the connection ends with ENHANCE_YOUR_CALM (RFC 9113 10.5).

Responsible for counting; must not know frames. Counts are set against useful work and against what the peer has read of
our answers. A count that passes its limit all the same is forgiven by the time that has gone by, so that a limit says
how fast a peer may be wrong, and not how old a connection may grow. The clock is asked at that moment only.

Each limit is far above what an honest peer was ever seen to do. Bounds on sizes are elsewhere: `headers` (lists and
blocks), `framing` and `settings` (messages, windows, streams), `loans` (unfinished messages), `core` (debug texts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trio_router.errors import ProtocolViolation
from trio_router.http2.frames import ErrorCode

# Answers (PING and SETTINGS acks, resets of refused streams) that wait because the peer does not read. 17 bytes
# each, so 170 kB. A client that opens a thousand streams before it has read our SETTINGS is honest; ten thousand
# unread answers are not.
MAX_PENDING_ANSWERS: Final = 10_000
# Bytes that wait for a peer that does not read, beyond which a server refuses requests and a client makes none: each
# request leaves headers and trailers behind, which flow control does not hold back. A thousand streams that are
# answered at once need a tenth of it.
MAX_UNREAD_BYTES: Final = 1 << 20
# Frames in a row that carry nothing (PING, SETTINGS, PRIORITY, GOAWAY, DATA without a byte of a message, informational
# headers, unknown types, acks of nothing, resets and headers of streams that are gone), with no message, request or
# response between them, and how many a second are forgiven. The DATA of closed streams does not count: the reset of a
# thousand streams with tokens in flight leaves a hundred thousand such frames, and nobody is to blame.
MAX_IDLE_FRAMES: Final = 20_000
IDLE_FRAMES_PER_SECOND: Final = 1000
# A change of the initial window is a change of every open stream's window, so a SETTINGS frame of 15 bytes may cost as
# much as hundreds of frames; this many streams make it count as one frame more.
STREAMS_PER_IDLE_FRAME: Final = 8
# WINDOW_UPDATE frames in a row, of which each is paid for by so many bytes of our output. A peer that returns credit on
# the stream and on the connection for every message of one byte sends one per seven bytes; the others, a hundredth.
MAX_CREDITS: Final = 20_000
BYTES_PER_CREDIT: Final = 7
CREDITS_PER_SECOND: Final = 1000
# Requests that ended before we answered them at all, less those we did answer: "rapid reset" (CVE-2023-44487), or the
# same by frames for which we must reset the stream (CVE-2025-8671). A front that drops its whole load at once stays
# below it, since at most max_concurrent_streams can be open; one whose clients lose patience while we are overloaded
# is forgiven 500 a second, which costs us 5 % of a core.
MAX_UNANSWERED_RESETS: Final = 10_000
UNANSWERED_RESETS_PER_SECOND: Final = 500

Clock = Callable[[], float]
"""Seconds since any moment. It may stand still: then nothing is forgiven."""


def no_clock() -> float:
    """Time that stands still."""
    return 0.0


class Patience:
    """The counts of one connection. Methods that count raise `ProtocolViolation` when a limit is passed.

    * `answers`: queued only because the peer sent something; set to 0 when output is handed to the transport.
    * `idle_frames`: in a row that carried nothing; set to 0 by a request, a response or a message.
    * `credits`: WINDOW_UPDATE frames that our output has not paid for; also set to 0 by those.
    * `unanswered_resets`: requests that ended before anything was sent for them, less those that were answered.
    """

    __slots__ = ("_clock", "_forgiven_at", "answers", "credits", "idle_frames", "unanswered_resets")

    def __init__(self, clock: Clock = no_clock) -> None:
        self.answers = 0
        self.idle_frames = 0
        self.credits = 0
        self.unanswered_resets = 0
        self._clock = clock
        now = clock()
        self._forgiven_at = {"idle": now, "credit": now, "reset": now}

    def answer(self) -> None:
        """A frame was queued only because the peer sent one."""
        self.answers += 1
        if self.answers > MAX_PENDING_ANSWERS:
            raise _calm(f"{self.answers} answers that the peer has not read")

    def idle_frame(self, *, weight: int = 1) -> None:
        """A frame came that carries nothing and costs as much as `weight` of them."""
        self.idle_frames += weight
        if self.idle_frames > MAX_IDLE_FRAMES:
            self.idle_frames = self._forgive("idle", self.idle_frames, per_second=IDLE_FRAMES_PER_SECOND)
            if self.idle_frames > MAX_IDLE_FRAMES:
                raise _calm(f"{self.idle_frames} frames in a row that carry nothing")

    def credit(self) -> None:
        """A WINDOW_UPDATE came."""
        self.credits += 1
        if self.credits > MAX_CREDITS:
            self.credits = self._forgive("credit", self.credits, per_second=CREDITS_PER_SECOND)
            if self.credits > MAX_CREDITS:
                raise _calm(f"{self.credits} WINDOW_UPDATE frames for nothing")

    def unanswered_reset(self) -> None:
        """A request has ended to which we had sent nothing."""
        self.unanswered_resets += 1
        if self.unanswered_resets > MAX_UNANSWERED_RESETS:
            self.unanswered_resets = self._forgive(
                "reset", self.unanswered_resets, per_second=UNANSWERED_RESETS_PER_SECOND
            )
            if self.unanswered_resets > MAX_UNANSWERED_RESETS:
                raise _calm(f"{self.unanswered_resets} requests reset before an answer")

    def answered(self) -> None:
        """We sent response headers."""
        self.unanswered_resets = max(0, self.unanswered_resets - 1)

    def work(self) -> None:
        """A request, a response or a message came."""
        self.idle_frames = self.credits = 0

    def taken(self, size: int) -> None:
        """The transport has taken so many bytes of output."""
        self.answers = 0
        if self.credits:
            self.credits = max(0, self.credits - size // BYTES_PER_CREDIT)

    def _forgive(self, kind: str, count: int, *, per_second: int) -> int:
        now = self._clock()
        elapsed = now - self._forgiven_at[kind]
        self._forgiven_at[kind] = now
        return max(0, count - int(elapsed * per_second))


def _calm(why: str) -> ProtocolViolation:
    return ProtocolViolation(why, h2_code=ErrorCode.ENHANCE_YOUR_CALM)
