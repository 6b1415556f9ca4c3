"""How much nonsense a peer may cause before the connection ends with ENHANCE_YOUR_CALM (RFC 9113 10.5).

Responsible for counting; must not know frames. There is no clock here, so each count is set against useful work
or against what the peer has read of our answers, not against time. Each limit is far above what an honest peer
was ever seen to do.
"""

from __future__ import annotations

from typing import Final

from trio_router.errors import ProtocolViolation
from trio_router.http2.frames import ErrorCode

# Answers (PING and SETTINGS acks, resets of refused streams) that wait because the peer does not read. 17 bytes
# each, so 170 kB. A client that opens a thousand streams before it has read our SETTINGS is honest; ten thousand
# unread answers are not.
MAX_PENDING_ANSWERS: Final = 10_000
# Frames in a row that carry nothing (empty DATA, PRIORITY, unknown types, frames for closed streams), with no
# message or request between them. A reset of many streams with frames in flight gives a few hundred.
MAX_IDLE_FRAMES: Final = 20_000
# Requests that were reset before we answered them at all, less those we did answer: "rapid reset". A front that
# drops its whole load at once stays below it, since at most max_concurrent_streams can be open.
MAX_UNANSWERED_RESETS: Final = 10_000


class Patience:
    """The three counts of one connection. Every method raises `ProtocolViolation` when its limit is passed."""

    __slots__ = ("_answers", "_idle_frames", "_unanswered_resets")

    def __init__(self) -> None:
        self._answers = 0
        self._idle_frames = 0
        self._unanswered_resets = 0

    def answer(self) -> None:
        """A frame was queued only because the peer sent one."""
        self._answers += 1
        if self._answers > MAX_PENDING_ANSWERS:
            raise _calm(f"{self._answers} answers that the peer has not read")

    def answers_left(self) -> None:
        """Queued answers have been handed to the transport."""
        self._answers = 0

    def idle_frame(self) -> None:
        """A frame came that carries nothing."""
        self._idle_frames += 1
        if self._idle_frames > MAX_IDLE_FRAMES:
            raise _calm(f"{self._idle_frames} frames in a row that carry nothing")

    def useful(self) -> None:
        """A request, response or message came."""
        self._idle_frames = 0

    def unanswered_reset(self) -> None:
        """The peer reset a request to which we had sent nothing."""
        self._unanswered_resets += 1
        if self._unanswered_resets > MAX_UNANSWERED_RESETS:
            raise _calm(f"{self._unanswered_resets} requests reset before an answer")

    def answered(self) -> None:
        """We sent response headers."""
        if self._unanswered_resets:
            self._unanswered_resets -= 1


def _calm(why: str) -> ProtocolViolation:
    return ProtocolViolation(why, h2_code=ErrorCode.ENHANCE_YOUR_CALM)
