"""The demo as a stranger runs it: a process, real sockets, and its exit status."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from typing import Any

import pytest
import trio

from trio_router.demo.pictures import PUBLIC_ONLY, Picture
from trio_router.demo.run import Answer, DemoSettings, demo
from trio_router.engine.settings import Faults
from trio_router.engine.worker import Worker
from trio_router.rpc.transport import Listener, open_tcp_listener
from trio_router.testing.origin import picture

DEMO = [sys.executable, "-m", "trio_router", "demo"]


def event(text: str | None = None, *, finish: str | None = None, usage: dict[str, int] | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}], "usage": usage}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=60, check=False)


async def serve_picture(listener: Listener, asked: list[bytes]) -> None:
    """A web server that has one picture, at every path but /text, and writes down what it is asked for."""
    while True:
        transport = await listener.accept()
        request = b""
        while b"\r\n\r\n" not in request:
            await transport.wait_readable()
            request += transport.recv_nowait(65536) or b""
        asked.append(request.partition(b"\r\n")[0])
        body = b"hello" if b" /text " in request else picture("red")
        transport.send_nowait(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        transport.close()


class TestAsAProcess:
    @pytest.mark.parametrize("connector", ["nixl", "mooncake"])
    def test_once_for_machines_is_one_json_object_that_tells_of_both_legs(self, connector):
        done = run("--once", "--json", "--max-tokens", "6", "--connector", connector)
        assert (done.returncode, done.stderr) == (0, "")
        [line] = done.stdout.splitlines()
        story = json.loads(line)
        assert story["ok"] is True
        assert story["problems"] == []
        assert story["connector"] == connector
        assert story["prefill_worker"].startswith("prefill-")
        assert story["decode_worker"].startswith("decode-")
        assert story["tokens"] == 6
        assert story["kv_pulls"] == 1
        assert story["pulled_tokens"] == story["prompt_tokens"]
        assert story["ledger_entries"] == 0
        assert set(story["timings_ms"]) >= {"queue", "prefill", "handoff", "first_token", "per_token"}

    @pytest.mark.parametrize("connector", ["nixl", "mooncake"])
    def test_with_a_picture_it_tells_that_one_worker_processed_it_for_both(self, connector):
        done = run("--once", "--json", "--max-tokens", "6", "--connector", connector, "--image", "sample")
        assert (done.returncode, done.stderr) == (0, "")
        story = json.loads(done.stdout)
        assert (story["ok"], story["problems"]) == (True, [])
        assert story["prompt"] == "What is in this picture?"
        assert story["pulled_tokens"] == story["prompt_tokens"] > 300
        image = story["image"]
        assert (image["source"], image["width"], image["height"]) == ("sample", 640, 480)
        once = {worker["name"]: int(worker["name"] == story["prefill_worker"]) for worker in story["workers"]}
        assert image["fetched"] == image["processed"] == once
        assert sum(once.values()) == 1
        assert image["identity"] == ["applied"]

    def test_a_file_is_shown_to_people_with_its_size(self, tmp_path):
        file = tmp_path / "harbour.png"
        file.write_bytes(picture("navy", size=(320, 200)))
        done = run("--once", "--max-tokens", "3", "--image", str(file), "--prompt", "And here?")
        assert (done.returncode, done.stderr) == (0, "")
        assert "harbour.png] And here?" in " ".join(done.stdout.split())
        assert "image, processed once on prefill-" in done.stdout
        assert "320\N{MULTIPLICATION SIGN}200" in done.stdout or "320x200" in done.stdout

    def test_once_for_people_shows_question_answer_and_picture(self):
        done = run("--once", "--max-tokens", "6", "--prompt", "Is it raining?")
        assert (done.returncode, done.stderr) == (0, "")
        assert "you      Is it raining?\n\nmodel    " in done.stdout
        assert "what the workers counted" in done.stdout
        assert "curl" not in done.stdout

    async def test_it_goes_on_serving_until_a_signal_and_then_exits_well(self):
        command = [*DEMO, "--max-tokens", "3"]
        with trio.fail_after(60):
            process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None
                shown = b""
                while b"/metrics" not in shown:
                    piece = await process.stdout.receive_some()
                    assert piece, shown
                    shown += piece
                assert b"curl -N http://127.0.0.1:" in shown
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 0
            finally:
                process.kill()


class TestWhenSomethingIsOff:
    @pytest.mark.parametrize(
        ("faults", "problem"),
        [
            (Faults(drop_handoff=True), "prompt tokens were computed twice"),
            (Faults(error_rate=1.0), "HTTP 500"),
        ],
    )
    async def test_the_exit_status_is_1_and_the_story_says_what(self, monkeypatch, faults, problem):
        # The demo's workers have no faults; here they are born with some.
        born = Worker.__init__

        def faulty(self: Worker, *args: Any, **kwargs: Any) -> None:
            born(self, *args, **kwargs)
            self.faults = faults

        monkeypatch.setattr(Worker, "__init__", faulty)
        said: list[str] = []
        settings = DemoSettings(prompt="Hello?", max_tokens=4, once=True, json=True)
        with trio.fail_after(60):
            status = await demo(settings, say=said.append, out=io.StringIO())
        assert status == 1
        story = json.loads(said[0])
        assert story["ok"] is False
        assert any(problem in each for each in story["problems"]), story["problems"]


class TestPicturesOnTheWeb:
    """An origin on loopback, as a person trying it would have."""

    async def told(self, *, path: str, allow: bool) -> tuple[int, dict[str, Any], list[bytes]]:
        listener = await open_tcp_listener("127.0.0.1", port=0)
        asked: list[bytes] = []
        said: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_picture, listener, asked)
            url = f"http://{listener.address}{path}"
            settings = DemoSettings(
                prompt="?",
                max_tokens=3,
                once=True,
                json=True,
                image=Picture(source=url, url=url),
                allow_private_hosts=allow,
            )
            with trio.fail_after(60):
                status = await demo(settings, say=said.append, out=io.StringIO())
            nursery.cancel_scope.cancel()
        listener.close()
        return status, json.loads(said[0]), asked

    async def test_a_url_is_left_to_the_worker_and_fetched_once(self):
        status, story, asked = await self.told(path="/one.png", allow=True)
        assert (status, story["problems"]) == (0, [])
        assert asked == [b"GET /one.png HTTP/1.1"]
        assert (story["image"]["width"], story["image"]["height"]) == (64, 48)

    async def test_a_host_that_the_router_refuses_is_told_with_what_to_do(self):
        status, story, asked = await self.told(path="/one.png", allow=False)
        assert (status, asked) == (1, [])
        assert story["problems"][0] == PUBLIC_ONLY
        assert story["image"]["width"] is None

    async def test_what_is_no_picture_is_told_and_nobody_has_processed_it(self):
        status, story, asked = await self.told(path="/text", allow=True)
        assert (status, len(asked)) == (1, 1)
        assert "image cannot be decoded" in story["problems"][0]
        assert "the picture was processed nowhere" in story["problems"]


class TestAnswer:
    def test_pieces_make_the_text_and_the_facts(self):
        answer = Answer(out=None)
        answer.begin("?")
        answer.take(event("The"))
        answer.take(event(" sea."))
        answer.take(event(finish="stop"))
        answer.take({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
        assert (answer.text, answer.finish_reason) == ("The sea.", "stop")
        assert (answer.prompt_tokens, answer.tokens) == (7, 2)

    def test_long_text_is_broken_at_spaces_and_loses_nothing(self):
        out = io.StringIO()
        answer = Answer(out=out)
        answer.begin("?")
        words = [f"word{number}" for number in range(100)]
        for number, word in enumerate(words):
            answer.take(event(word if not number else f" {word}"))
        answer.end()
        lines = out.getvalue().partition("model    ")[2].rstrip().splitlines()
        assert max(map(len, lines)) <= 90
        assert len(lines) > 3
        assert " ".join(lines).split() == words

    def test_a_line_end_in_the_text_is_one_on_the_screen(self):
        out = io.StringIO()
        answer = Answer(out=out)
        answer.begin("?")
        answer.take(event("one\ntwo"))
        assert out.getvalue().endswith("model    one\n         two")
