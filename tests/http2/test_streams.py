"""The table of what a peer may do: it has no holes, and its rows agree with RFC 9113 5.1."""

from __future__ import annotations

from itertools import product

import pytest

from trio_router.http2.frames import ErrorCode
from trio_router.http2.streams import RULES, Action, Input, Role, State

FAILING = {Action.FAIL_STREAM, Action.FAIL_CONNECTION}


def test_the_table_is_total():
    assert set(RULES) == set(product(Role, State, Input))


@pytest.mark.parametrize(("key", "rule"), list(RULES.items()))
def test_rows_are_consistent(key, rule):
    _role, state, event = key
    # A failing row says why and with which code, the others have neither.
    assert (rule.action in FAILING) is bool(rule.why) is (rule.code is not ErrorCode.NO_ERROR)
    if rule.action in FAILING or state is State.CLOSED:
        assert rule.target is State.CLOSED
    if rule.action is Action.IGNORE:
        assert rule.target is state
    if rule.action is Action.GRANT:
        assert (event, rule.target) == (Input.CREDIT, state)


@pytest.mark.parametrize(("role", "state"), list(product(Role, State)))
def test_a_push_always_fails_the_connection(role, state):
    assert RULES[role, state, Input.PUSH].action is Action.FAIL_CONNECTION


@pytest.mark.parametrize(("role", "state"), list(product(Role, set(State) - {State.AWAITING})))
def test_priority_is_ignored_everywhere(role, state):
    assert RULES[role, state, Input.PRIORITY].action is Action.IGNORE


@pytest.mark.parametrize(("role", "event"), list(product(Role, set(Input) - {Input.PUSH, Input.REQUEST})))
def test_frames_for_closed_streams_are_ignored(role, event):
    assert RULES[role, State.CLOSED, event].action is Action.IGNORE


def test_a_request_on_an_old_stream_fails_the_connection():
    rule = RULES[Role.SERVER, State.CLOSED, Input.REQUEST]
    assert (rule.action, rule.code) == (Action.FAIL_CONNECTION, ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("event", [Input.DATA, Input.DATA_END, Input.RESET, Input.CREDIT])
@pytest.mark.parametrize("role", list(Role))
def test_frames_for_idle_streams_fail_the_connection(role, event):
    assert RULES[role, State.IDLE, event].action is Action.FAIL_CONNECTION


@pytest.mark.parametrize("event", [Input.HEADERS, Input.HEADERS_END, Input.DATA, Input.DATA_END])
@pytest.mark.parametrize("role", list(Role))
def test_nothing_follows_the_end_of_a_stream(role, event):
    rule = RULES[role, State.REMOTE_ENDED, event]
    assert (rule.action, rule.code) == (Action.FAIL_STREAM, ErrorCode.STREAM_CLOSED)


def test_only_a_server_is_sent_requests():
    assert RULES[Role.SERVER, State.IDLE, Input.HEADERS].action is Action.OPEN
    assert RULES[Role.CLIENT, State.IDLE, Input.HEADERS].action is Action.FAIL_CONNECTION


def test_a_stream_tells_its_state(make_pair):
    pair = make_pair()
    stream, served = pair.call()
    pair.server.send_messages(served, [b"x"])
    pair.client_reading = False
    pair.settle()
    assert repr(stream) == "<Stream 1 RECEIVING unread=1 queued_bytes=0>"
    pair.client.reset(stream, ErrorCode.CANCEL)
    pair.settle()
    assert repr(served) == "<Stream 1 CLOSED closed reset_code=8 unread=0 queued_bytes=0>"
