"""Pictures and films through real processes: fetched once, by the prefill worker, and the text of one worker."""

from __future__ import annotations

import base64
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from trio_router.testing.origin import film, picture

from .conftest import Process, counters_of, prefill_flags, start_router, started

ITEMS = {"/red": picture("red"), "/blue": picture("blue"), "/film": film("red", "blue", "lime"), "/broken": b"GIF89a!"}


@dataclass
class Web:
    """An origin on this machine."""

    url: str = ""
    hits: Counter[str] = field(default_factory=Counter)


@contextmanager
def serving() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.hits[self.path] += 1
            content = ITEMS.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("content-length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A pair and a plain worker that see, a router before each, an origin and a directory."""

    web: Web
    directory: Path
    prefill: Process
    decode: Process
    addresses: list[str]
    pair: str
    plain: str
    metrics: str

    def url(self, name: str) -> str:
        """What stands for an item in a test's table: a name at the origin, or one with how it is carried."""
        carried, _, path = name.rpartition(":")
        if carried == "data":
            return f"data:image/png;base64,{base64.b64encode(ITEMS[path]).decode()}"
        return f"file://{self.directory}{path}" if carried == "file" else f"{self.web.url}{path}"

    def ask(self, router: str, names: list[str]) -> httpx.Response:
        parts: list[object] = [{"type": "text", "text": "Tell me what you see."}]
        for name in names:
            kind = "video_url" if "film" in name else "image_url"
            parts.append({"type": kind, kind: {"url": self.url(name)}})
        body = {
            "model": "tiny-vl-english",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 24,
            "temperature": 0,
        }
        return httpx.post(f"{router}/v1/chat/completions", json=body, timeout=60)

    def text(self, router: str, names: list[str]) -> str:
        answer = self.ask(router, names)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        assert isinstance(text, str)
        return text

    def processed(self) -> list[int]:
        return [reply.media_items_processed for reply in counters_of(self.addresses)]

    def lines(self, process: Process, *marks: str) -> int:
        return sum(all(mark in line for mark in ("Generate request", *marks)) for line in process.lines)


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def sight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sight]:
    directory = tmp_path_factory.mktemp("media")
    for path, content in ITEMS.items():
        (directory / path[1:]).write_bytes(content)
    with ExitStack() as stack:
        web = stack.enter_context(serving())

        def worker(role: str) -> Process:
            flags = ("--role", role, "--connector", request.param, "--port", "0", "--inter-token-ms", "1")
            media = ("--mm-processor", "inprocess", "--allowed-local-media-path", str(directory))
            return stack.enter_context(started("worker", *flags, *media))

        prefill, decode, plain = (worker(role) for role in ("prefill", "decode", "plain"))
        addresses = [process.find(r"grpc://(\S+)") for process in (prefill, decode, plain)]
        flags = ("--mm-processing", "worker", "--mm-allow-private-media-hosts")
        legs = (*prefill_flags(prefill, connector=request.param), "--decode", f"grpc://{addresses[1]}")
        pair = start_router(stack, *legs, *flags)
        alone = start_router(stack, "--worker-urls", f"grpc://{addresses[2]}", *flags)
        yield Sight(
            web=web,
            directory=directory,
            prefill=prefill,
            decode=decode,
            addresses=addresses,
            pair=pair.find(r"(http://\S+) \(OpenAI"),
            plain=alone.find(r"(http://\S+) \(OpenAI"),
            metrics=pair.find(r"(http://\S+/metrics)"),
        )


CASES = {
    "one image": ["/red"],
    "two images": ["/red", "/blue"],
    "one video": ["/film"],
    "image and video": ["/red", "/film"],
    "the same image twice": ["/red", "/red"],
    "in the request": ["data:/blue"],
    "in a file": ["file:/blue"],
    "of every kind": ["data:/red", "/film", "file:/blue"],
}


@pytest.mark.parametrize("names", CASES.values(), ids=CASES.keys())
def test_the_text_is_a_plain_workers_and_only_the_prefill_worker_looks(sight: Sight, names: list[str]):
    expected = sight.text(sight.plain, names)
    sight.web.hits.clear()
    before = sight.processed()
    told = [sight.lines(process, "media_refs=") for process in (sight.prefill, sight.decode)]
    with_refs = sight.lines(sight.prefill, f"media_refs={len(names)}")
    without = sight.lines(sight.decode, "preprocessed_mm=True, media_refs=0")

    assert sight.text(sight.pair, names) == expected

    assert sight.web.hits.total() == sum(not name.startswith(("data:", "file:")) for name in names)
    assert [now - then for now, then in zip(sight.processed(), before, strict=True)] == [len(names), 0, 0]
    # One line on each leg, and each of the right kind.
    assert [sight.lines(process, "media_refs=") for process in (sight.prefill, sight.decode)] == [n + 1 for n in told]
    assert sight.lines(sight.prefill, f"media_refs={len(names)}") == with_refs + 1
    assert sight.lines(sight.decode, "preprocessed_mm=True, media_refs=0") == without + 1


def test_pictures_of_one_size_behind_one_text_have_answers_of_their_own(sight: Sight):
    answers = [sight.text(sight.pair, [name]) for name in ("/red", "/blue", "/red", "/blue")]
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", ["/broken", "/missing"])
def test_what_cannot_be_seen_is_the_clients_and_the_next_request_is_served(sight: Sight, name: str):
    wanted = sight.text(sight.plain, ["/red"])
    for _ in range(3):
        answer = sight.ask(sight.pair, [name])
        assert answer.status_code == 400
        assert "media_refs[0]" in answer.json()["error"]["message"]
        assert sight.web.url not in answer.text
        assert sight.text(sight.pair, ["/red"]) == wanted


def test_the_router_counts_what_it_left_to_workers(sight: Sight):
    def counted() -> float:
        with urllib.request.urlopen(sight.metrics) as page:  # noqa: S310 - our own process
            lines = page.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("smg_mm_processing_total{") and 'mode="worker"' in line
        )

    before = counted()
    sight.text(sight.pair, ["/red"])
    assert counted() == before + 1


def test_no_url_and_no_payload_is_in_a_log(sight: Sight):
    sight.text(sight.pair, ["data:/red", "/blue"])
    payload = base64.b64encode(ITEMS["/red"]).decode()
    for process in (sight.prefill, sight.decode):
        output = "".join(process.lines)
        assert sight.web.url not in output
        assert payload[:40] not in output
