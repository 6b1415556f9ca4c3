"""Where the front's tokenizer comes from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import trio

import trio_router.engine.assets
from trio_router.errors import WorkerUnavailable
from trio_router.front.texts import BundleText
from trio_router.text.bundle import BadBundle, pack

ASSETS = Path(trio_router.engine.assets.__file__).parent


class Source:
    """Has no bundle the first `failures` times, and takes its time."""

    def __init__(self, *, failures: int = 0, archive: bytes | None = None) -> None:
        self.failures = failures
        self.archive = archive if archive is not None else pack(ASSETS)
        self.asked = 0

    def models(self) -> list[str]:
        return ["m"]

    async def tokenizer_bundle(self, model: str) -> tuple[bytes, str]:
        self.asked += 1
        await trio.sleep(5)
        if self.asked <= self.failures:
            raise WorkerUnavailable("no worker is ready", code="tokenizer_not_ready")
        return self.archive, hashlib.sha256(pack(ASSETS)).hexdigest()


async def test_many_callers_load_once(autojump_clock) -> None:
    source = Source()
    texts = BundleText(source)
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        for _ in range(10):

            @nursery.start_soon
            async def _() -> None:
                got.append(await texts.get("tiny-english"))

    assert source.asked == 1
    assert len({id(tokenizer) for tokenizer in got}) == 1
    assert texts.ready


async def test_a_caller_that_leaves_does_not_take_the_loading_with_it(autojump_clock) -> None:
    source = Source()
    texts = BundleText(source)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            with trio.move_on_after(1):
                await texts.get("m")

        await trio.sleep(0.5)
        assert (await texts.get("m")).vocab_size > 0


class TwoModels:
    """Serves models whose tokenizers differ."""

    def __init__(self, archives: dict[str, bytes]) -> None:
        self.archives = archives
        self.asked: list[str] = []

    def models(self) -> list[str]:
        return list(self.archives)

    async def tokenizer_bundle(self, model: str) -> tuple[bytes, str]:
        self.asked.append(model)
        archive = self.archives[model]
        return archive, hashlib.sha256(archive).hexdigest()


def other_assets(directory: Path) -> Path:
    """The same tokenizer with another template."""
    for file in ASSETS.glob("*.json"):
        directory.joinpath(file.name).write_bytes(file.read_bytes())
    config = msgspec.json.decode(directory.joinpath("tokenizer_config.json").read_bytes())
    config["chat_template"] = "another template"
    directory.joinpath("tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return directory


async def test_each_model_has_its_own_workers_tokenizer(autojump_clock, tmp_path) -> None:
    source = TwoModels({"a": pack(ASSETS), "b": pack(other_assets(tmp_path))})
    texts = BundleText(source)
    await texts.warm()
    assert source.asked == ["a", "b"]
    rendered = {model: (await texts.get(model)).template.render(MESSAGES) for model in "abab"}
    assert rendered["b"] == "another template"
    assert rendered["a"] != rendered["b"]
    assert source.asked == ["a", "b"], "loaded once each"


async def test_warming_waits_until_something_is_served(autojump_clock) -> None:
    source = TwoModels({})
    texts = BundleText(source)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(texts.warm)
        await trio.sleep(10)
        assert not texts.ready
        source.archives["a"] = pack(ASSETS)
    assert texts.ready


MESSAGES = [{"role": "user", "content": "hi"}]


async def test_without_a_bundle_callers_are_told(autojump_clock) -> None:
    texts = BundleText(Source(failures=1))

    with pytest.raises(WorkerUnavailable):
        await texts.get("m")

    assert not texts.ready
    assert (await texts.get("m")) is not None


async def test_a_bundle_that_was_changed_on_the_way_is_refused(autojump_clock) -> None:
    texts = BundleText(Source(archive=b"not the same"))

    with pytest.raises(BadBundle):
        await texts.get("m")

    assert not texts.ready


async def test_case_d6_warming_goes_on_until_the_tokenizer_is_there(autojump_clock) -> None:
    source = Source(failures=3)
    texts = BundleText(source)

    await texts.warm()

    assert texts.ready
    assert source.asked == 4


async def test_loading_goes_where_blocking_work_goes(autojump_clock) -> None:
    calls: list[str] = []

    async def offload(function):
        calls.append("offloaded")
        return function()

    await BundleText(Source(), offload=offload).get("m")

    assert calls == ["offloaded"]
