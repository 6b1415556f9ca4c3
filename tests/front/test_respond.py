"""Errors as replies."""

from __future__ import annotations

import msgspec
import pytest
from grpclib.const import Status

from trio_router import errors
from trio_router.front import faults
from trio_router.front.respond import error_event, grpc_reply, http_reply, is_planned


def rejected(status: Status) -> errors.WorkerRejected:
    return errors.WorkerRejected("the worker says no", status=status, leg="decode", details=["detail"])


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.INVALID_ARGUMENT, 400),
        (Status.FAILED_PRECONDITION, 400),
        (Status.OUT_OF_RANGE, 400),
        (Status.CANCELLED, 400),
        (Status.UNAUTHENTICATED, 401),
        (Status.PERMISSION_DENIED, 403),
        (Status.NOT_FOUND, 404),
        (Status.ALREADY_EXISTS, 409),
        (Status.ABORTED, 409),
        (Status.RESOURCE_EXHAUSTED, 429),
        (Status.UNAVAILABLE, 503),
        (Status.DEADLINE_EXCEEDED, 504),
        (Status.UNIMPLEMENTED, 501),
        (Status.INTERNAL, 500),
        (Status.UNKNOWN, 500),
        (Status.DATA_LOSS, 500),
    ],
)
def test_a_workers_status_has_its_http_status_and_stays_itself_on_grpc(status: Status, expected: int) -> None:
    assert http_reply(rejected(status)).status == expected
    assert grpc_reply(rejected(status)).status is status


def test_every_grpc_status_has_a_row() -> None:
    assert all(400 <= http_reply(rejected(status)).status <= 599 for status in Status)


def test_a_workers_message_and_details_are_passed_on() -> None:
    reply = grpc_reply(rejected(Status.NOT_FOUND))

    assert (reply.message, reply.details) == ("the worker says no", ["detail"])
    assert http_reply(rejected(Status.NOT_FOUND)).message == "the worker says no"


@pytest.mark.parametrize("cls", [errors.BadRequest, errors.ModelNotFound, errors.Unsupported, errors.WorkerUnavailable])
def test_the_family_replies_with_its_own_statuses(cls: type[errors.RouterError]) -> None:
    error = cls("because", code="finer_code")

    http, grpc = http_reply(error), grpc_reply(error)

    assert (http.status, http.code, http.message) == (cls.http_status, "finer_code", "because")
    assert (grpc.status, grpc.message) == (cls.grpc_status, "because")


def test_the_body_has_the_openai_shape() -> None:
    reply = http_reply(errors.BadRequest('say "please"', code="rude"))

    assert msgspec.json.decode(reply.body) == {
        "error": {"type": "Bad Request", "code": "rude", "message": 'say "please"', "param": None}
    }
    assert dict(reply.headers) == {b"content-type": b"application/json", b"x-smg-error-code": b"rude"}


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_retry_after_is_whole_seconds_and_never_zero(seconds: float) -> None:
    error = errors.WorkerUnavailable("busy")
    error.retry_after = seconds

    assert dict(http_reply(error).headers)[b"retry-after"] == b"1"


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, "1"), (0.0301, "31"), (1.0, "1000")])
def test_a_grpc_client_is_pushed_back_by_milliseconds_and_never_by_none(seconds: float, expected: str) -> None:
    error = errors.WorkerBusy("full", status=Status.RESOURCE_EXHAUSTED, leg="decode")
    error.retry_after = seconds

    assert dict(grpc_reply(error).metadata)["grpc-retry-pushback-ms"] == expected


@pytest.mark.parametrize("error", [errors.WorkerUnavailable("nobody"), rejected(Status.UNAVAILABLE), KeyError("bug")])
def test_nobody_is_told_when_to_come_back_where_that_is_not_known(error: Exception) -> None:
    assert "grpc-retry-pushback-ms" not in dict(grpc_reply(error).metadata)
    assert b"retry-after" not in dict(http_reply(error).headers)


@pytest.mark.parametrize(
    "error", [errors.BadRequest("no", code="finer_code"), rejected(Status.NOT_FOUND), KeyError("bug")]
)
def test_a_grpc_client_reads_the_code_that_an_http_client_does(error: Exception) -> None:
    assert dict(grpc_reply(error).metadata)["x-smg-error-code"] == http_reply(error).code


def test_a_method_that_is_not_allowed_names_those_that_are() -> None:
    reply = http_reply(faults.MethodNotAllowed("no", allowed=["GET", "HEAD"]))

    assert dict(reply.headers)[b"allow"] == b"GET, HEAD"


@pytest.mark.parametrize("error", [KeyError("secret"), ExceptionGroup("g", [ValueError("secret"), OSError("secret")])])
def test_what_nobody_planned_tells_nothing(error: Exception) -> None:
    assert not is_planned(error)
    assert http_reply(error).status == 500
    assert grpc_reply(error).status is Status.INTERNAL
    for told in (http_reply(error).body, grpc_reply(error).message.encode(), error_event(error)):
        assert b"secret" not in told


def test_of_a_group_the_planned_error_is_told() -> None:
    group = ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [errors.ModelNotFound("no such model")])])

    assert http_reply(group).status == 404
    assert is_planned(group)


def test_an_error_event_has_message_and_type() -> None:
    assert msgspec.json.decode(error_event(errors.DecodeFailed("the decode worker failed"))) == {
        "error": {"message": "the decode worker failed", "type": "internal_error", "code": "worker_stream_failed"}
    }


def test_a_message_that_is_no_text_is_still_told() -> None:
    error = errors.BadRequest("bad \udcff byte")

    assert msgspec.json.decode(http_reply(error).body)["error"]["message"] == "bad ? byte"
    assert b"bad ? byte" in error_event(error)


@pytest.mark.parametrize("status", [None, Status.NOT_FOUND])
def test_a_message_that_quotes_megabytes_keeps_its_beginning_and_its_end(status: Status | None) -> None:
    message = f"model {'x' * 1_000_000!r} is not served here; served: tiny-english"
    error: errors.RouterError = errors.ModelNotFound(message)
    if status is not None:
        error = errors.WorkerRejected(message, status=status, leg="decode")

    told = http_reply(error).message

    assert len(told) < 1100
    assert told.startswith("model 'xxx")
    assert told.endswith("xx' is not served here; served: tiny-english")
    assert grpc_reply(error).message == told
    assert len(error_event(error)) < 1200
