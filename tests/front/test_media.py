"""Admission of media: the fleet's facts, the operator's rules, and the names that somebody has to resolve."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
import trio

from trio_router.errors import BadRequest, RouterError, TooLarge, Unsupported
from trio_router.front.media import MediaDesk, system_addresses
from trio_router.front.settings import MediaSettings
from trio_router.media.gate import MediaPolicy
from trio_router.media.items import MediaItem, MediaPlan, Modality
from trio_router.media.mode import ProcessingMode, WorkerMedia
from trio_router.media.specs import ModelFacts
from trio_router.observe.hooks import Observer
from trio_router.offload import inline

ABLE = WorkerMedia(mm_processor="inprocess", leg="decode")
QWEN3 = ModelFacts(name="mine", model_type="qwen3_vl")


class Told(Observer):
    def __init__(self) -> None:
        self.resolutions: list[tuple[str, str, str]] = []

    def media_resolved(self, *, model: str, mode: str, reason: str) -> None:
        self.resolutions.append((model, mode, reason))


class Names:
    """A name server with known answers, each after a while."""

    def __init__(self, **known: Sequence[str]) -> None:
        self.known = known
        self.asked: list[str] = []
        self.seconds = 1.0

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        await trio.sleep(self.seconds)
        return self.known.get(host.partition(".")[0], ())


def plan_of(*urls: str, **fields) -> MediaPlan:
    return MediaPlan(
        tuple(
            MediaItem(modality=Modality.IMAGE, url=url, part=f"messages[{at}]", **fields) for at, url in enumerate(urls)
        )
    )


def desk(
    *workers: WorkerMedia, model: ModelFacts = QWEN3, names: Names | None = None, told: Told | None = None, **settings
) -> MediaDesk:
    return MediaDesk(
        lambda name: model,
        lambda name: workers or (ABLE,),
        settings=MediaSettings(**settings),
        observer=told,
        addresses=names or Names(),
    )


async def refusal(made: MediaDesk, plan: MediaPlan) -> RouterError:
    with pytest.raises(RouterError) as caught:
        await made.admit(plan, model="mine")
    return caught.value


PUBLIC = plan_of("http://8.8.8.8/x.png")


class TestWhoProcesses:
    async def test_what_workers_process_is_admitted_and_told(self):
        told = Told()
        await desk(told=told).admit(PUBLIC, model="mine")
        assert told.resolutions == [("mine", "worker", "auto_uniform")]

    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            ({"mode": ProcessingMode.ROUTER}, "config"),
            ({"model": ModelFacts(name="tiny-english")}, "model_not_opted_in"),
            ({"workers": (ABLE, WorkerMedia())}, "auto_mixed"),
            ({"workers": (WorkerMedia(),)}, "auto_none"),
        ],
    )
    async def test_what_the_router_would_have_to_process_is_not_implemented(self, made, reason):
        told = Told()
        error = await refusal(desk(*made.pop("workers", ()), told=told, **made), PUBLIC)
        assert isinstance(error, Unsupported)
        assert error.error_code == "multimodal_router_processing_unavailable"
        assert error.message.startswith("messages[0]: ")
        assert f"({reason})" in error.message
        assert told.resolutions == [("mine", "router", reason)]

    async def test_strict_mode_refuses_and_tells_nobody_a_side(self):
        told = Told()
        error = await refusal(desk(told=told, mode=ProcessingMode.WORKER), plan_of("http://8.8.8.8/", hints=("fps",)))
        assert error.error_code == "multimodal_hint_unsupported_in_worker_mode"
        assert told.resolutions == []

    async def test_the_fleet_is_asked_anew_for_each_request(self):
        fleet = [ABLE]
        made = MediaDesk(lambda name: QWEN3, lambda name: tuple(fleet))
        await made.admit(PUBLIC, model="mine")
        fleet.append(WorkerMedia())
        assert (await refusal(made, PUBLIC)).error_code == "multimodal_router_processing_unavailable"

    async def test_a_desk_without_a_fleet_admits_nothing_and_knows_families_by_name(self):
        assert (await refusal(MediaDesk(), PUBLIC)).error_code == "multimodal_router_processing_unavailable"
        assert MediaDesk().spec("tiny-english") is None
        assert MediaDesk().spec("qwen3-vl-8b") is not None


class TestWhatMayBeFetched:
    async def test_the_policy_is_the_operators(self):
        error = await refusal(desk(policy=MediaPolicy(max_image_bytes=2)), plan_of("data:image/png;base64,AAAAAAAA"))
        assert isinstance(error, TooLarge)
        assert error.error_code == "media_ref_too_large"

    async def test_case_b8_names_are_resolved_at_once_and_each_address_judged(self, autojump_clock):
        names = Names(good=["8.8.8.8"], fine=["2606:4700:4700::1111", "1.1.1.1"], bad=["8.8.8.8", "10.0.0.7"])
        made = desk(names=names)
        start = trio.current_time()

        await made.admit(plan_of("http://good.example", "https://fine.example", "http://good.example/2"), model="mine")
        error = await refusal(made, plan_of("http://good.example", "http://bad.example"))

        assert trio.current_time() == start + 2 * names.seconds
        assert sorted(names.asked[:2]) == ["fine.example", "good.example"]
        assert error.error_code == "media_ref_host_not_allowed"
        assert error.message.startswith("messages[1]: the host bad.example is not a public one")

    async def test_a_name_without_addresses_is_refused(self, autojump_clock):
        error = await refusal(desk(), plan_of("http://nowhere.example"))
        assert isinstance(error, BadRequest)
        assert error.error_code == "media_fetch_failed"

    async def test_a_resolver_that_takes_too_long_is_not_waited_for(self, autojump_clock):
        names = Names(slow=["8.8.8.8"])
        names.seconds = 60.0
        start = trio.current_time()
        error = await refusal(desk(names=names, resolve_seconds=3.0), plan_of("http://slow.example"))
        assert trio.current_time() == start + 3
        assert error.error_code == "media_fetch_failed"
        assert "slow.example could not be found in time" in error.message

    @pytest.mark.parametrize(
        "policy", [{"allow_private_hosts": True}, {"allowed_domains": ("inside.example",)}], ids=["private", "listed"]
    )
    async def test_no_name_is_asked_for_where_its_address_does_not_matter(self, policy):
        names = Names()
        await desk(names=names, policy=MediaPolicy(**policy)).admit(plan_of("http://inside.example"), model="mine")
        assert names.asked == []


class TestSystemResolver:
    async def test_all_addresses_are_asked_for(self, monkeypatch):
        def getaddrinfo(host, port, *, type, flags):  # noqa: A002 - the name of the real one's argument
            if flags & socket.AI_NUMERICHOST:
                raise socket.gaierror
            return [(socket.AF_INET, type, 6, "", ("8.8.8.8", 0)), (socket.AF_INET6, type, 6, "", ("::1", 0, 0, 0))]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        assert await system_addresses("media.example", offload=inline) == ["8.8.8.8", "::1"]

    @pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
    async def test_a_name_that_cannot_be_resolved_has_none(self, monkeypatch, error):
        def getaddrinfo(*args, **kwargs):
            raise error

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        assert await system_addresses("media.example", offload=inline) == []
