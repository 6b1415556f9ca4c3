"""Flow-control arithmetic (RFC 9113 5.2 and 6.9) as pure functions over integers.

The law that the connection keeps with them:

* **Sending.** A DATA byte leaves only under both windows, the stream's and the connection's. A stream window may
  become negative when the peer lowers INITIAL_WINDOW_SIZE; it then sends nothing until it is positive again.
* **Connection credit is returned on receipt**, whatever becomes of the bytes: a stream that nobody reads, or that
  is dead, must not take the window away from the others.
* **Stream credit is returned on consumption.** This is the back-pressure: an unread stream stops its peer after
  one window.
* **Bytes of an unfinished message are returned as they are buffered**, else a message larger than the window
  could never arrive; but only while no finished message of that stream is waiting unread. So what a stalled
  reader makes us hold is bounded by one message and one window.
* **Credit is returned in batches** of at least half a window: fewer frames, and the peer never runs dry, for it
  still has the other half.
"""

from __future__ import annotations

from trio_router.http2.frames import MAX_WINDOW


def due(*, window: int, left: int, held: int) -> int:
    """How much credit to return now: 0, or at least half a window.

    `window` is what the peer may have in flight, `left` what it may still send, `held` the bytes received but not
    consumed.
    """
    owed = window - left - held
    return owed if owed * 2 >= window and owed > 0 else 0


def grown(window: int, increment: int) -> int | None:
    """The window after an increment, or a shift that may be negative; None when it exceeds 2^31-1."""
    total = window + increment
    return total if total <= MAX_WINDOW else None
