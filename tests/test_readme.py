"""What the README shows is run: its embedding example, and the example file that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from trio_router.engine.settings import WorkerSettings
from trio_router.engine.worker import open_worker
from trio_router.rpc.transport import open_tcp_listener

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def programs() -> dict[str, str]:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    found = {f"README block {number}": block for number, block in enumerate(blocks, start=1)}
    return found | {"examples/embed.py": (ROOT / "examples" / "embed.py").read_text()}


@pytest.mark.parametrize("name", programs())
async def test_the_embedding_example_streams_tokens_through_a_pair(name):
    source = programs()[name]
    listeners = [await open_tcp_listener("127.0.0.1", port=0) for _ in range(4)]
    prefill = WorkerSettings(name="prefill", role="prefill")
    decode = WorkerSettings(name="decode", role="decode")
    async with (
        open_worker(prefill, listener=listeners[0], transfer_listener=listeners[1]) as first,
        open_worker(decode, listener=listeners[2], transfer_listener=listeners[3]) as second,
    ):
        source = source.replace("127.0.0.1:50051", first.address).replace("127.0.0.1:50052", second.address)
        with trio.fail_after(40):
            result = await trio.run_process(
                [sys.executable, "-c", source], capture_stdout=True, capture_stderr=True, check=False
            )
    assert result.returncode == 0, result.stderr.decode()
    assert 1 <= len(result.stdout.splitlines()) <= 16
    assert second.counters.pulls == 1
    assert second.counters.recomputed_prompt_tokens == 0
    assert dict(first.ledger) == {}


def test_the_commands_of_the_readme_name_what_exists():
    for command in re.findall(r"^trio-router (\S+)", README, flags=re.MULTILINE):
        shown = subprocess.run(
            [sys.executable, "-m", "trio_router", command, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        command.replace("\\\n", " ").split()
        for command in re.findall(r"^trio-router serve ((?:.*\\\n)*.*)", README, flags=re.MULTILINE)
    ],
    ids=" ".join,
)
def test_what_the_readme_gives_to_serve_is_right(arguments):
    checked = subprocess.run(
        [sys.executable, "-m", "trio_router", "check-config", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
