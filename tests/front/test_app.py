"""Routes, request ids and health."""

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing

from trio_router.front.app import HttpFront
from trio_router.front.seams import Readiness
from trio_router.observe.hooks import Observer


class IdleRouter:
    """Serves models, and would never be asked to generate."""

    ready = True

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def models(self) -> list[str]:
        return self.names

    def generate(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is generated here")


class NoText:
    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready

    async def get(self, model: str) -> None:
        raise AssertionError("no text is needed here")


@pytest.fixture
def connect(launch):
    """A client of a front: `await connect(router=..., texts=..., readiness=...)`."""

    async def connect_to(*, router=None, texts=None, readiness=None, observer=None):
        numbers = itertools.count(1)
        front = HttpFront(
            router or IdleRouter("tiny-english"),
            texts or NoText(),
            readiness=readiness,
            observer=observer,
            ids=lambda: f"{next(numbers):032x}",
        )
        site = await launch(front, server=front.server)
        return await site.connect(), front

    return connect_to


# routes


async def test_models_are_listed(autojump_clock, connect) -> None:
    client, _ = await connect(router=IdleRouter("one", "org/two"))

    response = await client.request("GET", "/v1/models")

    assert response.header("content-type") == "application/json"
    assert response.json == {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 0, "owned_by": "trio-router"} for name in ("one", "org/two")
        ],
    }


@pytest.mark.parametrize("path", ["/v1/models/org/two", "/v1/models/org%2Ftwo"])
async def test_one_model_is_shown(autojump_clock, connect, path: str) -> None:
    client, _ = await connect(router=IdleRouter("one", "org/two"))

    assert (await client.request("GET", path)).json["id"] == "org/two"


async def test_a_model_that_is_not_served_is_not_found(autojump_clock, connect) -> None:
    client, _ = await connect()

    response = await client.request("GET", "/v1/models/other")

    assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")


async def test_an_unknown_path_is_told_in_json(autojump_clock, connect) -> None:
    client, _ = await connect()

    response = await client.request("GET", "/v2/x?y=1")

    assert response.status == 404
    assert response.json["error"] == {
        "type": "Not Found",
        "code": "route_not_found",
        "message": "nothing is served at /v2/x",
        "param": None,
    }


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models/x", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(autojump_clock, connect, method, path, allowed) -> None:
    client, _ = await connect()

    response = await client.request(method, path)

    assert (response.status, response.header("allow")) == (405, allowed)
    assert response.json["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/health", "/liveness"])
async def test_the_process_lives(autojump_clock, connect, path: str) -> None:
    client, _ = await connect()

    response = await client.request("GET", f"{path}?verbose=1")

    assert (response.status, response.body) == (200, b"OK")
    assert (await client.request("HEAD", path)).header("content-length") == "2"


async def test_a_coded_body_is_refused(autojump_clock, connect) -> None:
    client, _ = await connect()

    response = await client.request("POST", "/v1/completions", body=b"\x1f\x8b", headers="content-encoding: gzip\r\n")

    assert (response.status, response.json["error"]["code"]) == (415, "unsupported_content_encoding")


# request ids


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123", "abc-123"),
        ("x" * 128, "x" * 128),
        ("x" * 129, None),
        ("a b", None),
        ("\u00e9", None),
    ],
)
async def test_a_clients_request_id_is_echoed_if_it_is_one(autojump_clock, connect, given, echoed) -> None:
    client, _ = await connect()

    response = await client.request("GET", "/health", headers=f"x-request-id: {given}\r\n")

    assert response.header("x-request-id") == (echoed or "req-" + "0" * 31 + "1")


async def test_errors_carry_the_request_id_too(autojump_clock, connect) -> None:
    client, _ = await connect()

    response = await client.request("GET", "/nowhere", headers="x-request-id: mine\r\n")

    assert response.header("x-request-id") == "mine"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_case_c3_headers_are_said_once_and_are_right(autojump_clock, connect, method: str) -> None:
    client, _ = await connect()

    response = await client.request(method, "/v1/models")

    names = [name for name, _ in response.headers]
    assert len(names) == len(set(names))
    assert {"date", "content-type", "content-length", "x-request-id"} <= set(names)
    assert not {"connection", "keep-alive", "transfer-encoding", "upgrade", "server"} & set(names)


# refusals: a request that never became one of the router's has no record, and is accounted for all the same


class Refusals(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def request_refused(self, *, request_id: str, client: str, code: str) -> None:
        self.told.append((request_id, client, code))


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/nowhere", b"", ("http", "route_not_found")),
        ("DELETE", "/v1/models", b"", ("http", "method_not_allowed")),
        ("GET", "/v1/models/gpt", b"", ("http", "model_not_found")),
        ("POST", "/v1/chat/completions", b"{", ("chat", "malformed_json")),
        ("POST", "/v1/chat/completions", b"{}", ("chat", "invalid_request_parameters")),
        ("POST", "/v1/completions", b'{"prompt": "x", "echo": true}', ("completions", "not_implemented")),
    ],
)
async def test_what_is_refused_is_told_once_with_its_id(autojump_clock, connect, method, path, body, expected) -> None:
    refusals = Refusals()
    client, _ = await connect(observer=refusals)

    response = await client.request(method, path, body=body)

    assert response.status >= 400
    assert refusals.told == [(response.header("x-request-id"), *expected)]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", "malformed_http"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n", "payload_too_large"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nfoo: " + b"x" * 40_000 + b"\r\n\r\n", "headers_too_large"),
        (b"GET / HTTP/1.1\r\n", "request_read_timeout"),
    ],
)
async def test_so_is_what_could_not_be_read(autojump_clock, connect, sent: bytes, code: str) -> None:
    refusals = Refusals()
    client, _ = await connect(observer=refusals)

    await client.send(sent)
    response = await client.response()

    assert response.json["error"]["code"] == code
    assert refusals.told == [(response.header("x-request-id"), "http", code)]
    assert response.header("date") is not None


async def test_so_is_a_client_that_leaves_before_its_request_is_one_of_the_router_s(autojump_clock, connect) -> None:
    class SlowText(NoText):
        async def get(self, model: str) -> None:
            await trio.sleep_forever()

    refusals = Refusals()
    client, _ = await connect(observer=refusals, texts=SlowText())
    await client.send(wire(b'{"messages":[{"role":"user","content":"x"}]}'))
    await trio.testing.wait_all_tasks_blocked()

    client.leave()
    await trio.testing.wait_all_tasks_blocked()

    assert [told[1:] for told in refusals.told] == [("chat", "client_gone")]


def wire(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def test_what_is_answered_is_no_refusal(autojump_clock, connect) -> None:
    refusals = Refusals()
    client, front = await connect(observer=refusals, readiness=lambda: Readiness(ready=False))

    for path in ("/health", "/v1/models", "/readiness"):
        await client.request("GET", path)

    await trio.testing.wait_all_tasks_blocked()
    assert refusals.told == []
    assert front.server.responses == {200: 2, 503: 1}


# readiness


@pytest.mark.parametrize(
    ("state", "text", "status", "answer"),
    [
        (Readiness(ready=True), True, 200, {"status": "ready"}),
        (
            Readiness(ready=True, healthy_workers=3, total_workers=4),
            True,
            200,
            {"status": "ready", "healthy_workers": 3, "total_workers": 4},
        ),
        (
            Readiness(ready=False, reason="insufficient healthy workers", healthy_workers=0, total_workers=4),
            True,
            503,
            {
                "status": "not ready",
                "reason": "insufficient healthy workers",
                "healthy_workers": 0,
                "total_workers": 4,
            },
        ),
        (Readiness(ready=True), False, 503, {"status": "not ready", "reason": "tokenizer not yet registered"}),
    ],
)
async def test_readiness_says_why_not(autojump_clock, connect, state, text: bool, status: int, answer: dict) -> None:
    client, _ = await connect(texts=NoText(ready=text), readiness=lambda: state)

    response = await client.request("GET", "/readiness")

    assert (response.status, response.json) == (status, answer)


async def test_by_default_the_router_says_whether_it_is_ready(autojump_clock, connect) -> None:
    router = IdleRouter()
    client, _ = await connect(router=router)
    assert (await client.request("GET", "/readiness")).status == 200

    router.ready = False

    assert (await client.request("GET", "/readiness")).json["reason"] == "insufficient healthy workers"


async def test_while_draining_it_lives_but_is_not_ready(autojump_clock, connect) -> None:
    client, front = await connect()
    await client.send(b"GET /readiness HTTP/1.1\r\n")
    for _ in range(5):
        await client.send(b"")
    front.drain(grace=30)
    await client.send(b"host: a\r\n\r\n")

    response = await client.response()

    assert (response.status, response.json["reason"]) == (503, "draining")
