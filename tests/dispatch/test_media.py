"""Requests with media references through a pair: processed once, on the prefill leg, or again where that is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trio_router.dispatch import attempt as attempt_module
from trio_router.dispatch.handoff import HandoffSettings, OnEmptyPrefill
from trio_router.dispatch.identity import IdentityOutcome, judge
from trio_router.dispatch.retry import RetrySettings
from trio_router.dispatch.router import RouterSettings
from trio_router.errors import BadRequest, ModelNotFound, RouterError, WorkerUnavailable
from trio_router.observe.log import RequestLog
from trio_router.protocol.codec import encode
from trio_router.protocol.messages import (
    GenerateRequest,
    MediaIdentity,
    MediaRef,
    MediaRefs,
    Modality,
    MultimodalInputs,
    PlaceholderRange,
)
from trio_router.testing import collect
from trio_router.testing.scripted import (
    a_request,
    chunk,
    complete,
    decode_worker,
    handoff_params,
    open_scene,
    plain_worker,
    prefill_worker,
)

ONCE = RouterSettings(retry=RetrySettings(attempts=1))
IDENTITY = MediaIdentity(
    prompt_token_ids=list(range(1, 51)),
    mm_inputs=MultimodalInputs(
        modality=Modality.IMAGE, mm_hashes=["a" * 64], mm_placeholders=[PlaceholderRange(offset=3, length=11)]
    ),
)
ABLE = {"mm_processor": "inprocess", "mm_schemes": "http,https,data"}


def with_media(*, url: str = "https://pictures.example/1.png", n: int = 1) -> GenerateRequest:
    request = a_request(n=n)
    request.media_refs = MediaRefs(items=[MediaRef(modality=Modality.IMAGE, url=url)])
    return request


def prefill_answer(*, kv: bool = True, identity: MediaIdentity | None = IDENTITY, reason: str = "length") -> Any:
    fields: dict[str, Any] = {}
    if kv:
        fields["kv_transfer_params_json"] = handoff_params()
    if identity is not None:
        fields["media_identity"] = identity

    async def script(call, request) -> None:
        await call.send(complete(reason, **fields))

    return script


async def samples(call, request) -> None:
    """A decode leg that ends well, whatever number of samples it is for."""
    for index in range(request.sampling_params.n or 1):
        await call.send(chunk(7, index=index))
        await call.send(complete(index=index))


async def decode_leg_of(
    *, script: Any, connector: str = "NixlConnector", n: int = 1, engine_id: str = "engine-1"
) -> tuple[GenerateRequest, list[tuple[str, str | None]]]:
    """What the decode worker gets, and what was said of the media."""
    prefill = prefill_worker(script, connector=connector, engine_id=engine_id, **ABLE)
    decode = decode_worker(samples, **ABLE)
    async with open_scene(prefill, decode, router=ONCE) as scene:
        await collect(scene.router, with_media(n=n))
        assert scene.leaks() == []
        [leg] = decode.requests
        return leg, scene.recorder.media


def goes_by_identity(leg: GenerateRequest) -> bool:
    processed = leg.mm_inputs == IDENTITY.mm_inputs and leg.tokenized.input_ids == IDENTITY.prompt_token_ids
    assert processed is not bool(leg.media_refs.items), "either the identity or the references"
    return processed


class TestDecodeLeg:
    """The decision table, row by row, with the connectors that make its columns."""

    @pytest.mark.parametrize(
        ("script", "connector", "n", "outcome"),
        [
            (prefill_answer(), "NixlConnector", 1, "applied"),
            (prefill_answer(identity=None), "NixlConnector", 1, "missing"),
            (prefill_answer(kv=False), "NixlConnector", 1, "no_handoff"),
            (prefill_answer(kv=False, identity=None), "NixlConnector", 1, "missing"),
            (prefill_answer(kv=False), "MooncakeConnector", 1, "applied"),
            (prefill_answer(kv=False, identity=None), "MooncakeConnector", 1, "missing"),
            (prefill_answer(kv=False, reason="stop"), "MooncakeConnector", 1, "no_handoff"),
            (prefill_answer(identity=None), "FancyConnector", 1, "not_solicited"),
            (prefill_answer(kv=False, identity=None), "FancyConnector", 1, "not_solicited"),
            (prefill_answer(), "NixlConnector", 3, "several_samples"),
            (prefill_answer(), "MooncakeConnector", 3, "several_samples"),
        ],
    )
    async def test_i7_a_row(self, autojump_clock, script, connector, n, outcome):
        leg, told = await decode_leg_of(script=script, connector=connector, n=n)
        assert told == [(outcome, None)]
        assert goes_by_identity(leg) is (outcome == "applied")

    @pytest.mark.parametrize(("identity", "outcome"), [(IDENTITY, "no_handoff"), (None, "not_solicited")])
    async def test_i7_mooncake_without_an_engine_to_name(self, autojump_clock, identity, outcome):
        """The typed address makes no engine fetch anything: a leg without pixels would be computed without them."""
        script = prefill_answer(kv=False, identity=identity)
        leg, told = await decode_leg_of(script=script, connector="MooncakeConnector", engine_id="")
        assert told == [(outcome, None)]
        assert leg.kv_transfer_params.remote_host
        assert not goes_by_identity(leg)

    @pytest.mark.parametrize("params", ["{}", '{"do_remote_prefill": false}'])
    async def test_i7_params_that_hand_nothing_over_are_no_handoff(self, autojump_clock, params):
        async def script(call, request) -> None:
            await call.send(complete(kv_transfer_params_json=params, media_identity=IDENTITY))

        leg, told = await decode_leg_of(script=script)
        assert told == [("no_handoff", None)]
        assert not goes_by_identity(leg)
        assert leg.kv_transfer_params_json is None

    async def test_i7_one_that_cannot_be_used_is_warned_of(self, autojump_clock, caplog):
        broken = MediaIdentity(prompt_token_ids=[1], mm_inputs=IDENTITY.mm_inputs)
        leg, [(outcome, detail)] = await decode_leg_of(script=prefill_answer(identity=broken))
        assert (outcome, detail) == ("invalid", "a placeholder is not inside its prompt")
        assert not goes_by_identity(leg)
        assert json.loads(leg.kv_transfer_params_json or "") == json.loads(handoff_params()), "handed over all the same"

    async def test_of_a_text_request_nothing_is_said(self, autojump_clock):
        decode = decode_worker(samples)
        async with open_scene(prefill_worker(prefill_answer()), decode) as scene:
            await collect(scene.router, a_request())
            assert scene.recorder.media == []
            assert not decode.requests[0].mm_inputs.mm_hashes


@pytest.mark.parametrize(("outcome", "lines"), [("missing", 1), ("invalid", 1), ("not_solicited", 0), ("applied", 0)])
def test_a_worker_is_blamed_only_where_it_was_asked(caplog, outcome, lines):
    RequestLog().media_judged(request_id="mine", outcome=outcome, detail="why")
    assert len([record for record in caplog.records if "media identity" in record.getMessage()]) == lines


class TestBrokenRules:
    """With either guard taken out, a row of the table above must show it."""

    @pytest.mark.parametrize(
        ("guard", "script", "n"),
        [
            ("handed_over", prefill_answer(kv=False), 1),
            ("fault", prefill_answer(identity=MediaIdentity(prompt_token_ids=[1], mm_inputs=IDENTITY.mm_inputs)), 1),
        ],
    )
    async def test_i7_a_guard_that_is_gone_is_seen(self, autojump_clock, monkeypatch, guard, script, n):
        blind = {"handed_over": True, "fault": None}[guard]
        monkeypatch.setattr(attempt_module, "judge", lambda **given: judge(**{**given, guard: blind}))
        _, told = await decode_leg_of(script=script, n=n)
        assert told[0][0] == "applied"

    def test_i7_without_the_relays_guard_several_samples_would_share_one(self):
        given = {"handed_over": True, "solicited": True, "identity": IDENTITY, "fault": None}
        assert judge(n=2, **given) is not IdentityOutcome.APPLIED
        assert judge(n=1, **given) is IdentityOutcome.APPLIED


class TestChoosing:
    """Requirement B: what is the matter is told in the order of its importance."""

    async def refused(self, *workers: Any, url: str = "https://pictures.example/1.png", **settings: Any) -> RouterError:
        async with open_scene(*workers, router=RouterSettings(**settings)) as scene:
            with pytest.raises(RouterError) as caught:
                await collect(scene.router, with_media(url=url))
            assert [request for worker in workers for request in worker.requests] == []
            assert scene.leaks() == []
            return caught.value

    async def test_nobody_who_fetches_is_told_as_such_at_once(self, autojump_clock):
        error = await self.refused(prefill_worker(), decode_worker(**ABLE))
        assert isinstance(error, WorkerUnavailable)
        assert error.error_code == "no_media_ref_capable_worker"
        assert "prefill" in error.message

    async def test_decode_workers_for_language_only_are_named(self, autojump_clock):
        error = await self.refused(prefill_worker(**ABLE), decode_worker())
        assert error.error_code == "pd_decode_language_model_only_media_refs"

    async def test_both_legs_count_for_a_scheme(self, autojump_clock):
        narrow = {"mm_processor": "inprocess", "mm_schemes": "data"}
        for prefill, decode in ((ABLE, narrow), (narrow, ABLE)):
            error = await self.refused(prefill_worker(**prefill), decode_worker(**decode))
            assert isinstance(error, BadRequest)
            assert error.error_code == "media_ref_scheme_not_accepted"
            assert "'https'" in error.message

    async def test_a_worker_that_names_no_scheme_takes_any(self, autojump_clock):
        silent = {"mm_processor": "inprocess"}
        workers = prefill_worker(prefill_answer(), **silent), decode_worker(samples, **silent)
        async with open_scene(*workers) as scene:
            await collect(scene.router, with_media(url="s3://bucket/1.png"))
            assert scene.recorder.media == [("applied", None)]

    async def test_a_model_that_nobody_serves_is_not_found(self, autojump_clock):
        async with open_scene(prefill_worker(), decode_worker()) as scene:
            with pytest.raises(ModelNotFound):
                async with scene.router.generate(with_media(), model="another"):
                    pass

    async def test_those_who_fetch_are_chosen_on_every_attempt(self, autojump_clock):
        """Case B12: a retry must not land on a worker of another kind."""

        async def fail(call, request) -> None:
            await call.send(complete("error"))

        able = [plain_worker(fail, name=f"able-{number}", **ABLE) for number in range(2)]
        narrow = plain_worker(fail, name="narrow", mm_processor="inprocess", mm_schemes="data")
        blind = plain_worker(fail, name="blind")
        async with open_scene(*able, narrow, blind) as scene:
            with pytest.raises(RouterError):
                await collect(scene.router, with_media())
        assert [len(worker.requests) for worker in (*able, narrow, blind)] == [3, 2, 0, 0]

    async def test_what_a_worker_says_of_itself_now_counts(self, autojump_clock):
        worker = plain_worker(samples, **ABLE)
        async with open_scene(worker) as scene:
            await collect(scene.router, with_media())
            worker.mm_processor = ""
            await scene.router.registry._probe(scene.router.registry.workers[0])
            with pytest.raises(WorkerUnavailable, match="mm_processor"):
                await collect(scene.router, with_media())

    async def test_a_prefill_pool_that_cannot_may_be_left_out(self, autojump_clock):
        settings = RouterSettings(handoff=HandoffSettings(on_empty_prefill=OnEmptyPrefill.DECODE_LOCAL))
        decode = decode_worker(samples, **ABLE)
        async with open_scene(prefill_worker(), decode, router=settings) as scene:
            await collect(scene.router, with_media())
            assert scene.recorder.media == [("not_solicited", None)]
        assert decode.requests[0].media_refs.items


def test_the_request_of_these_tests_has_its_references_on_the_wire():
    assert b"pictures.example" in encode(with_media())
