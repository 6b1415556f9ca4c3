"""One stream: what users read of it, and the table of what its peer may do next.

Two rules. (1) What a frame means depends only on (role, state, input): it is looked up, never decided in code.
(2) This module must not know bytes: frames, windows and header encoding are the connection's.

```
            request headers                END_STREAM
  IDLE ──────────────────────▶ RECEIVING ─────────────▶ REMOTE_ENDED ──▶ CLOSED
    │ (client: opened by us)      ▲                            ▲      (our end too, or a reset)
    └──────────▶ AWAITING ────────┘────── trailers-only ───────┘
```

A client's stream passes through REMOTE_ENDED without stopping there: with the response complete, nobody wants the
rest of the request. A server's stream goes from RECEIVING to DEAF when a message cannot be read. Whether *we* may
still send is a separate, simpler question (`sendable`): it never changes what a peer may send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, final

from trio_router.errors import ProtocolViolation, TooLarge
from trio_router.http2.frames import ErrorCode

if TYPE_CHECKING:
    from trio_router.http2.core import Core
    from trio_router.http2.framing import Assembler
    from trio_router.http2.headers import Headers


class _Symbol(Enum):
    """Hashed by identity: the table below is read for every frame off the fast path, and the usual hash is slow."""

    __hash__ = object.__hash__


class Role(_Symbol):
    """Which end of the connection we are."""

    CLIENT = "client"
    SERVER = "server"


class State(_Symbol):
    """What the peer has done with a stream so far."""

    IDLE = "never opened"
    AWAITING = "request sent, response headers not here yet (client only)"
    RECEIVING = "headers are here, messages may follow"
    REMOTE_ENDED = "the peer has ended its side"
    DEAF = "a message could not be read, and the peer is still to be told so (server only)"
    CLOSED = "over, by both ends or a reset"


class Input(_Symbol):
    """What a peer can do to a stream."""

    INFORMATIONAL = "a 1xx header list"
    HEADERS = "a header list that does not end the stream"
    HEADERS_END = "a header list that ends the stream"
    REQUEST = "a request's header list on an id that is no new one (server only)"
    DATA = "DATA"
    DATA_END = "DATA that ends the stream"
    RESET = "RST_STREAM"
    CREDIT = "WINDOW_UPDATE"
    PRIORITY = "PRIORITY"
    PUSH = "PUSH_PROMISE"


class Action(Enum):
    """What the connection does about it."""

    OPEN = "a new request"
    RESPOND = "response headers"
    TRAILERS_ONLY = "a response that is nothing but trailers"
    TRAILERS = "trailers after the messages"
    DELIVER = "bytes of messages"
    DELIVER_LAST = "the last bytes of messages"
    RESET = "the peer gave the stream up"
    GRANT = "credit for our data"
    IGNORE = "nothing"
    FAIL_STREAM = "the stream fails, the connection goes on"
    FAIL_CONNECTION = "the connection fails"


class Rule(NamedTuple):
    """A row of the table; `code` and `why` belong to the failing actions."""

    action: Action
    target: State
    code: ErrorCode = ErrorCode.NO_ERROR
    why: str = ""


def _stream_error(why: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> Rule:
    return Rule(Action.FAIL_STREAM, State.CLOSED, code, why)


def _connection_error(why: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> Rule:
    return Rule(Action.FAIL_CONNECTION, State.CLOSED, code, why)


_NEVER_OPENED: Final = _connection_error("frame for a stream that was never opened")
_OLD_ID: Final = _connection_error("a request on a stream that is no new one")
_ENDED: Final = _stream_error("frame after the end of the stream", ErrorCode.STREAM_CLOSED)
_PUSH: Final = _connection_error(
    "PUSH_PROMISE, which we never allow"
)  # our SETTINGS disable it; clients may never push
_IGNORED: Final = Rule(Action.IGNORE, State.CLOSED)
_RESET: Final = Rule(Action.RESET, State.CLOSED)

_COMMON: Final[Mapping[State, Mapping[Input, Rule]]] = {
    State.IDLE: {
        **dict.fromkeys(Input, _NEVER_OPENED),
        Input.PRIORITY: Rule(Action.IGNORE, State.IDLE),
        Input.PUSH: _PUSH,
    },
    State.RECEIVING: {
        Input.INFORMATIONAL: _stream_error("informational headers after the final ones"),
        Input.HEADERS: _stream_error("a second header list that does not end the stream"),
        Input.HEADERS_END: Rule(Action.TRAILERS, State.REMOTE_ENDED),
        Input.REQUEST: _stream_error("a second request on one stream"),
        Input.DATA: Rule(Action.DELIVER, State.RECEIVING),
        Input.DATA_END: Rule(Action.DELIVER_LAST, State.REMOTE_ENDED),
        Input.RESET: _RESET,
        Input.CREDIT: Rule(Action.GRANT, State.RECEIVING),
        Input.PRIORITY: Rule(Action.IGNORE, State.RECEIVING),
        Input.PUSH: _PUSH,
    },
    State.REMOTE_ENDED: {
        **dict.fromkeys(Input, _ENDED),
        Input.RESET: _RESET,
        Input.CREDIT: Rule(Action.GRANT, State.REMOTE_ENDED),
        Input.PRIORITY: Rule(Action.IGNORE, State.REMOTE_ENDED),
        Input.PUSH: _PUSH,
    },
    # No client stream is ever in this state: a client resets such a stream.
    State.DEAF: {
        **dict.fromkeys(Input, Rule(Action.IGNORE, State.DEAF)),
        Input.REQUEST: _OLD_ID,
        Input.RESET: _RESET,
        Input.CREDIT: Rule(Action.GRANT, State.DEAF),
        Input.PUSH: _PUSH,
    },
    # Also streams that were never used but lie below a newer one (RFC 9113 5.1.1), and those we reset while the
    # peer was still sending: telling the cases apart would need a memory of every stream that ever was. What comes late
    # is never a request, though.
    State.CLOSED: {**dict.fromkeys(Input, _IGNORED), Input.REQUEST: _OLD_ID, Input.PUSH: _PUSH},
}

_AWAITING_CLIENT: Final[Mapping[Input, Rule]] = {
    Input.INFORMATIONAL: Rule(Action.IGNORE, State.AWAITING),
    Input.HEADERS: Rule(Action.RESPOND, State.RECEIVING),
    Input.HEADERS_END: Rule(Action.TRAILERS_ONLY, State.REMOTE_ENDED),
    Input.REQUEST: _stream_error("a request from a server"),
    Input.DATA: _stream_error("DATA before the response headers"),
    Input.DATA_END: _stream_error("DATA before the response headers"),
    Input.RESET: _RESET,
    Input.CREDIT: Rule(Action.GRANT, State.AWAITING),
    Input.PRIORITY: Rule(Action.IGNORE, State.AWAITING),
    Input.PUSH: _PUSH,
}

_BY_ROLE: Final[Mapping[Role, Mapping[State, Mapping[Input, Rule]]]] = {
    Role.CLIENT: {**_COMMON, State.AWAITING: _AWAITING_CLIENT},
    Role.SERVER: {
        **_COMMON,
        State.IDLE: {
            **_COMMON[State.IDLE],
            Input.HEADERS: Rule(Action.OPEN, State.RECEIVING),
            Input.HEADERS_END: Rule(Action.OPEN, State.REMOTE_ENDED),
        },
        # No server stream is ever in this state; the rows exist so that the table has no holes.
        State.AWAITING: dict.fromkeys(
            Input, _connection_error("a server awaits no response", ErrorCode.INTERNAL_ERROR)
        ),
    },
}

RULES: Final[Mapping[tuple[Role, State, Input], Rule]] = MappingProxyType(
    {
        (role, state, event): rule
        for role, states in _BY_ROLE.items()
        for state, rows in states.items()
        for event, rule in rows.items()
    }
)


@final
class Stream:
    """One request and its response.

    Made by `Connection` only; users read the attributes listed here and call `take` and `credit`. The rest belongs to
    the connection.

    * `id`: the stream id.
    * `headers`: of the request (server) or the response (client), raw; None until they come.
    * `trailers`: on a trailers-only response the same list as `headers`, and `trailers_only` is True.
    * `messages`: complete gRPC messages not yet taken.
    * `remote_ended`: END_STREAM came. Read it before `reset_code`: a server that answered early resets the stream of
      a finished response.
    * `reset_code`: of the RST_STREAM that came, any number; REFUSED_STREAM also when a GOAWAY refused the stream.
    * `refused`: the peer said that it never processed the request, so it may be repeated.
    * `lost`: the connection went away first.
    * `failure`: the peer broke the protocol on this stream and we have reset it; but a server's stream whose message
      could not be read waits for its owner to say so in trailers. A client may find `trailers` all the same, when
      they ended the stream inside a message: their status is then the better explanation.
    * `closed`: nothing will come or go any more.
    * `queued_bytes`: accepted by `send_messages` and not yet in the output, gRPC prefixes included.
    * `user`: whatever the owner wants to hang on to the stream.
    """

    __slots__ = (
        "assembler",
        "batch",
        "borrowed",
        "closed",
        "content_left",
        "core",
        "ending",
        "failure",
        "flowing",
        "headers",
        "id",
        "local_ended",
        "lost",
        "messages",
        "plain",
        "queue",
        "queued_bytes",
        "receive_left",
        "refused",
        "remote_ended",
        "reset_code",
        "send_window",
        "sendable",
        "started",
        "state",
        "taken",
        "trailers",
        "trailers_only",
        "user",
    )

    def __init__(self, stream_id: int, *, core: Core, state: State, receive_left: int, send_window: int) -> None:
        self.id = stream_id
        self.headers: Headers | None = None
        self.trailers: Headers | None = None
        self.trailers_only = False
        self.messages: list[bytes] = []
        self.remote_ended = False
        self.reset_code: int | None = None
        self.refused = False
        self.lost = False
        self.failure: ProtocolViolation | TooLarge | None = None
        self.closed = False
        self.queued_bytes = 0
        self.user: object | None = None

        self.core = core
        self.state = state
        # Receiving. `plain`: the next DATA frame may be handled on the fast path (right state, no unfinished
        # message).
        self.plain = state is State.RECEIVING
        self.batch = 0  # the call of receive() that touched it last
        self.receive_left = receive_left  # what the peer may still send
        self.taken = False  # messages were taken whose credit has not been given back
        self.borrowed = 0  # credit given for bytes that have not been consumed: see `loans`
        self.content_left: int | None = None  # of the bytes a content-length promised; None without one
        self.assembler: Assembler | None = None  # made for the first message that is not exactly one frame
        # Sending. `started`: our headers are out (or in the output list, which is the same to the compression state).
        self.started = False
        self.sendable = False  # messages are welcome
        self.flowing = False  # and none is queued, so that the next may go straight into the output
        self.send_window = send_window
        self.queue: deque[bytes | memoryview] | None = None
        self.ending: Headers | None = None  # trailers that follow the queue; an empty list is a bare END_STREAM
        self.local_ended = False  # our END_STREAM is out

    def take(self) -> list[bytes]:
        """Return the messages and forget them. Gives no credit: that is `credit`, when they have been consumed."""
        messages = self.messages
        if messages:
            self.messages = []
            self.taken = True
        return messages

    def credit(self) -> None:
        """All messages taken so far have been consumed: let the peer send as much again, in batches."""
        self.taken = False
        core = self.core
        if self.borrowed:
            core.settle(self)
        if self.receive_left <= core.stream_credit_mark and not self.remote_ended and not self.closed:
            core.return_credit(self)

    @property
    def heard(self) -> tuple[int, int]:
        """Changes with every byte that the peer sends on this stream."""
        return self.receive_left, 0 if self.assembler is None else self.assembler.held

    def __repr__(self) -> str:
        flags = [name for name in ("refused", "lost", "closed") if getattr(self, name)]
        if self.reset_code is not None:
            flags.append(f"reset_code={self.reset_code}")
        if self.failure is not None:
            flags.append(f"failure={self.failure}")
        return (
            f"<Stream {self.id} {self.state.name}{' ' if flags else ''}{' '.join(flags)}"
            f" unread={len(self.messages)} queued_bytes={self.queued_bytes}>"
        )
