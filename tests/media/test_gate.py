"""What may be forwarded to workers."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import BadRequest, RouterError, TooLarge
from trio_router.media.gate import (
    DEFAULT_INPUT_BYTES,
    MediaPolicy,
    Unresolved,
    accepted_schemes,
    base64_length,
    check_plan,
    fleet_schemes,
    item_limits,
    parse_item_limits,
    parse_schemes,
)
from trio_router.media.items import MediaItem, MediaPlan, Modality
from trio_router.media.mode import WorkerMedia
from trio_router.media.specs import ModelFacts, spec_for

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
QWEN3, LLAMA4 = (spec_for(ModelFacts(name=name)) for name in ("qwen3-vl", "llama-4"))
USUAL = frozenset({"http", "https", "data"})


def plan_of(*urls: str, modality: Modality = IMAGE) -> MediaPlan:
    return MediaPlan(tuple(MediaItem(modality=modality, url=url, part=f"part {at}") for at, url in enumerate(urls)))


def worker(schemes: str = "", *, leg: str = "decode", limits: str = "") -> WorkerMedia:
    return WorkerMedia(mm_processor="inprocess", schemes=parse_schemes(schemes), leg=leg, item_limits=limits)


def check(plan: MediaPlan, *workers: WorkerMedia, spec=QWEN3, **policy) -> tuple[Unresolved, ...]:
    return check_plan(plan, spec=spec, workers=workers or (worker(),), policy=MediaPolicy(**policy))


def refusal(plan: MediaPlan, *workers: WorkerMedia, **policy) -> RouterError:
    with pytest.raises(RouterError) as caught:
        check(plan, *workers, **policy)
    return caught.value


class TestSchemes:
    @pytest.mark.parametrize(
        ("text", "schemes"),
        [("", None), (" , ", None), ("http", {"http"}), ("HTTP, https,data ", {"http", "https", "data"})],
    )
    def test_a_worker_tells_them_with_commas_or_not_at_all(self, text, schemes):
        assert parse_schemes(text) == schemes

    @pytest.mark.parametrize(
        ("legs", "accepted"),
        [
            ([], USUAL),
            ([None, None], USUAL),
            ([{"https"}, None], {"https"}),
            ([None, {"https", "file"}], {"https", "file"}),
            ([{"https", "data"}, {"https", "http"}], {"https"}),
            ([{"data"}, {"http"}], set()),
        ],
    )
    def test_both_legs_count_and_one_that_does_not_say_constrains_nothing(self, legs, accepted):
        assert accepted_schemes(leg and frozenset(leg) for leg in legs) == accepted

    def test_of_a_leg_any_worker_may_be_the_one_that_can(self):
        fleet = [worker("http", leg="prefill"), worker("http,file", leg="prefill"), worker("http,file,data")]
        assert fleet_schemes(fleet) == {"http", "file"}
        assert fleet_schemes([worker(leg="prefill"), worker("data", leg="prefill"), worker("http")]) == {"http"}

    @pytest.mark.parametrize("leg", ["prefill", "decode"])
    def test_a_scheme_that_one_leg_cannot_fetch_is_refused(self, leg):
        other = "decode" if leg == "prefill" else "prefill"
        error = refusal(
            plan_of("http://a.example/x"), worker("https,data", leg=leg), worker("http,https,data", leg=other)
        )
        assert isinstance(error, BadRequest)
        assert error.error_code == "media_ref_scheme_not_accepted"
        assert error.message == ("part 0: its URL has the scheme 'http'; the workers of this model accept data, https")

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a.example/x", "/etc/passwd", "gopher://x", ""])
    def test_case_b8_what_nobody_accepts_is_refused(self, url):
        assert refusal(plan_of("data:image/png;base64,AA", url)).error_code == "media_ref_scheme_not_accepted"

    def test_an_url_without_a_scheme_is_told_so(self):
        assert "its URL has no scheme;" in refusal(plan_of("/etc/passwd")).message

    def test_a_path_of_a_file_may_not_be_longer_than_any_is(self):
        with pytest.raises(BadRequest, match="the limit is 8192") as caught:
            check(plan_of("file:///" + "x/" * 5000), worker("file"))
        assert caught.value.error_code == "invalid_multimodal_request"

    def test_files_are_for_workers_that_say_so(self):
        assert check(plan_of("file:///media/x.png"), worker("http,file", leg="prefill"), worker("file")) == ()


class TestHosts:
    def test_names_are_returned_once_with_the_first_part_that_has_them(self):
        plan = plan_of("http://a.example/1", "data:image/png;base64,AA", "https://b.example", "https://A.example./2")
        assert check(plan) == (Unresolved("a.example", "part 0"), Unresolved("b.example", "part 2"))

    def test_public_addresses_need_no_resolving(self):
        assert check(plan_of("http://8.8.8.8/x")) == ()

    @pytest.mark.parametrize(
        "url", ["http://127.0.0.1/", "http://localhost:8000/x", "http://metadata.google.internal/", "https://[::1]/"]
    )
    def test_case_b8_hosts_that_are_not_public_are_refused(self, url):
        error = refusal(plan_of("http://8.8.8.8", url))
        assert error.error_code == "media_ref_host_not_allowed"
        assert error.message.startswith("part 1: the host ")

    @pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://localhost:8000/x", "http://a.example"])
    def test_private_hosts_can_be_allowed_and_then_no_name_is_resolved(self, url):
        assert check(plan_of(url), allow_private_hosts=True) == ()

    def test_a_list_of_domains_opens_what_is_on_it_and_closes_the_rest(self):
        listed = {"allowed_domains": ("cdn.example", "minio.internal")}
        assert check(plan_of("http://cdn.example/x", "http://minio.internal:9000/y"), **listed) == ()
        for url in ("http://other.example/", "http://127.0.0.1/", "http://8.8.8.8/"):
            assert refusal(plan_of(url), **listed).error_code == "media_ref_host_not_allowed"
        assert refusal(plan_of("http://other.example/"), allow_private_hosts=True, **listed)

    def test_what_is_malformed_is_so_wherever_it_may_lead(self):
        assert refusal(plan_of("http://2130706433/"), allow_private_hosts=True).error_code == (
            "invalid_multimodal_request"
        )


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "limits"),
        [
            ("image=8,video=2", {IMAGE: 8, VIDEO: 2}),
            (" image = 8 ", {IMAGE: 8}),
            ("audio=0", {AUDIO: 0}),
            ("", {}),
            ("image,video=,=3,point_cloud=4,image=many,video=-1,image=\u00b2", {}),
        ],
    )
    def test_a_workers_limits_are_read_and_nonsense_is_passed_over(self, text, limits):
        assert parse_item_limits(text) == limits

    def test_the_strictest_counts_whoever_sets_it(self):
        workers = [worker(limits="image=4,video=3", leg="prefill"), worker(limits="image=6")]
        found = item_limits(QWEN3, workers=workers, policy=MediaPolicy())
        assert found == {IMAGE: (4, "a worker's"), VIDEO: (1, "the model's")}
        assert item_limits(QWEN3, workers=workers, policy=MediaPolicy(image_limit=2))[IMAGE] == (2, "the operator's")
        assert item_limits(QWEN3, workers=[], policy=MediaPolicy(image_limit=99))[IMAGE] == (10, "the model's")

    def test_as_many_as_allowed_pass_and_the_first_one_too_many_is_named(self):
        assert check(plan_of(*["http://8.8.8.8/"] * 10)) == ()
        error = refusal(plan_of(*["http://8.8.8.8/"] * 11))
        assert error.error_code == "invalid_multimodal_request"
        assert error.message == "part 10: the request has 11 images, the model's limit is 10"

    def test_one_too_many_of_one_is_told_in_the_singular(self):
        error = refusal(plan_of("http://8.8.8.8/"), image_limit=0)
        assert "the request has 1 image, the operator's limit is 0" in error.message
        assert "the request has 2 images," in refusal(plan_of(*["http://8.8.8.8/"] * 2), image_limit=0).message

    def test_a_modality_that_the_model_does_not_have_is_refused(self):
        error = refusal(plan_of("http://8.8.8.8/", modality=VIDEO), spec=LLAMA4)
        assert "the request has 1 video, the model's limit is 0" in error.message


class TestDataUrls:
    @pytest.mark.parametrize(
        ("head", "modality"),
        [
            ("data:image/png;base64,", IMAGE),
            ("DATA:Image/SVG+xml;charset=utf-8;BASE64,", IMAGE),
            ("data:video/mp4;base64,", VIDEO),
            ("data:image/gif;base64,", VIDEO),
        ],
    )
    def test_a_media_type_and_base64_are_fine(self, head, modality):
        assert check(plan_of(head + "AAAA", modality=modality)) == ()

    @pytest.mark.parametrize(
        ("url", "modality"),
        [
            ("data:", IMAGE),
            ("data:image/png;base64", IMAGE),
            ("data:image/png,AAAA", IMAGE),
            ("data:image/png;base32,AAAA", IMAGE),
            ("data:,", IMAGE),
            ("data:,AAAA", IMAGE),
            ("data:;base64,AAAA", IMAGE),
            ("data:base64,AAAA", IMAGE),
            ("data:text/html;base64,AAAA", IMAGE),
            ("data:video/mp4;base64,AAAA", IMAGE),
            ("data:audio/wav;base64,AAAA", VIDEO),
            ("data:image/png;base64,", IMAGE),
            ("data:image/png;" + "x" * 300 + ";base64,AAAA", IMAGE),
        ],
    )
    def test_anything_else_is_refused(self, url, modality):
        error = refusal(plan_of(url, modality=modality))
        assert error.error_code == "invalid_multimodal_request"
        assert "data: URL" in error.message
        assert "AAAA" not in error.message

    @given(st.integers(min_value=0, max_value=10_000))
    def test_the_length_of_base64_is_known_without_encoding(self, size):
        assert base64_length(size) == len(base64.b64encode(bytes(size)))

    @pytest.mark.parametrize(("modality", "limit"), [(IMAGE, "max_image_bytes"), (VIDEO, "max_video_bytes")])
    def test_content_up_to_the_limit_passes_and_more_does_not(self, modality, limit):
        def url(size: int) -> MediaPlan:
            return plan_of("data:image/gif;base64," + base64.b64encode(bytes(size)).decode(), modality=modality)

        assert check(url(300), **{limit: 300}) == ()
        error = refusal(url(301), **{limit: 300})
        assert isinstance(error, TooLarge)
        assert error.error_code == "media_ref_too_large"
        assert "300 bytes" in error.message

    def test_the_default_is_256_mib(self):
        assert MediaPolicy().max_image_bytes == MediaPolicy().max_video_bytes == DEFAULT_INPUT_BYTES == 268_435_456

    def test_the_media_type_is_looked_for_at_the_beginning_only(self):
        url = "data:image/png;base64" + "A" * 1000 + ",AAAA"
        assert refusal(plan_of(url)).error_code == "invalid_multimodal_request"
