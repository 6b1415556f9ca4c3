"""Every event in every state of a stream: what the table of rules says is what happens."""

from __future__ import annotations

from itertools import product

import pytest

from trio_router.http2 import ErrorCode, Role, frames
from trio_router.http2.frames import FrameType
from trio_router.http2.framing import join
from trio_router.http2.streams import RULES, Action, Input, State

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/test/Method")]
RESPONSE = [(b":status", b"200")]
TRAILERS = [(b"grpc-status", b"0")]
BOTH = list(Role)


def receiving(peer):
    """Stream 1 in the state where messages may come."""
    if peer.connection._core.role is Role.SERVER:
        (stream,) = peer.headers(1, REQUEST)
    else:
        stream = peer.connection.open_stream(REQUEST)
        peer.headers(1, RESPONSE)
    peer.output()
    return stream


def in_state(peer, state: State):
    """Stream 1 of `peer`, brought into `state`; None if it is to be idle."""
    role = peer.connection._core.role
    if state is State.IDLE:
        return None
    stream = peer.connection.open_stream(REQUEST) if state is State.AWAITING else receiving(peer)
    if state is State.REMOTE_ENDED:
        peer.data(1, b"", end=True)
    if state is State.DEAF:
        peer.data(1, b"\x01\0\0\0\0")
    if state is State.CLOSED:
        peer.connection.reset(stream, ErrorCode.CANCEL)
    peer.output()
    assert stream.state is state
    assert role is Role.SERVER or state is not State.REMOTE_ENDED
    return stream


def send(peer, event: Input) -> list:
    """Make `event` happen to stream 1."""
    match event:
        case Input.INFORMATIONAL:
            return peer.headers(1, [(b":status", b"103")])
        case Input.HEADERS | Input.HEADERS_END:
            server = peer.connection._core.role is Role.SERVER
            known = peer.connection._core.streams.get(1)
            old = server and peer.connection._core.last_peer_id
            if old or (known is not None and known.state is State.RECEIVING):
                headers = TRAILERS
            else:
                headers = REQUEST if server else RESPONSE
            return peer.headers(1, headers, end=event is Input.HEADERS_END)
        case Input.REQUEST:
            return peer.headers(1, REQUEST)
        case Input.DATA | Input.DATA_END:
            return peer.data(1, join([b"message"]), end=event is Input.DATA_END)
        case Input.RESET:
            return peer.write(FrameType.RST_STREAM, 0, 1, b"\0\0\0\x08")
        case Input.CREDIT:
            return peer.write(FrameType.WINDOW_UPDATE, 0, 1, b"\0\0\0\x01")
        case Input.PRIORITY:
            return peer.write(FrameType.PRIORITY, 0, 1, bytes(5))
        case Input.PUSH:
            return peer.write(FrameType.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\x02")


REACHABLE = [
    (role, state, event)
    for role, state, event in product(Role, State, Input)
    if not (role is Role.SERVER and (state is State.AWAITING or event is Input.INFORMATIONAL))
    # A request on an id that was never used opens it.
    and not (event is Input.REQUEST and (role is Role.CLIENT or state is State.IDLE))
    # A client ends its side together with the server's, and has nothing to say to one that failed.
    and not (role is Role.CLIENT and state in (State.REMOTE_ENDED, State.DEAF))
]


def expect(stream, **values) -> None:
    assert {name: getattr(stream, name) for name in values} == values


EFFECT = {
    Action.FAIL_STREAM: lambda stream: expect(stream, closed=True),
    Action.GRANT: lambda stream: expect(stream, closed=False),
    Action.RESET: lambda stream: expect(stream, reset_code=8, closed=True),
    Action.DELIVER: lambda stream: expect(stream, messages=[b"message"], remote_ended=False),
    Action.DELIVER_LAST: lambda stream: expect(stream, messages=[b"message"], trailers=None),
    Action.TRAILERS: lambda stream: expect(stream, trailers=TRAILERS, trailers_only=False),
    Action.RESPOND: lambda stream: expect(stream, headers=RESPONSE, trailers=None, remote_ended=False),
    Action.TRAILERS_ONLY: lambda stream: expect(stream, headers=RESPONSE, trailers=RESPONSE, trailers_only=True),
    Action.OPEN: lambda stream: expect(stream, headers=REQUEST, closed=False),
}


class TestEveryRow:
    @pytest.mark.parametrize(("role", "state", "event"), REACHABLE)
    def test_a_frame_does_what_the_table_says(self, make_scripted, role, state, event):
        peer = make_scripted(role)
        stream = in_state(peer, state)
        window = stream.send_window if stream else None
        rule = RULES[role, state, event]
        touched = send(peer, event)
        written = peer.output()
        connection = peer.connection

        if rule.action is Action.FAIL_CONNECTION:
            assert (connection.error.h2_code, connection.error.message) == (rule.code, rule.why)
            assert written[-1].kind == FrameType.GOAWAY
            assert written[-1].payload[4:8] == int(rule.code).to_bytes(4, "big")
            assert stream is None or stream.closed
            return
        assert connection.error is None
        resets = [int.from_bytes(frame.payload, "big") for frame in written if frame.kind == FrameType.RST_STREAM]
        if rule.action is Action.IGNORE:
            assert (touched, resets) == ([], [])
            return
        stream = stream or touched[0]
        EFFECT[rule.action](stream)
        if rule.action is Action.FAIL_STREAM:
            assert (stream.failure.message, resets) == (rule.why, [rule.code])
        if rule.action is Action.GRANT:
            assert stream.send_window == window + 1
        ended = event in (Input.DATA_END, Input.HEADERS_END)
        if rule.action is not Action.FAIL_STREAM and ended:
            assert stream.remote_ended
        if role is Role.CLIENT and rule.target is State.REMOTE_ENDED:
            # The response is complete, and the request had not ended.
            assert (stream.state, resets) == (State.CLOSED, [ErrorCode.NO_ERROR])
        else:
            assert stream.state is rule.target
