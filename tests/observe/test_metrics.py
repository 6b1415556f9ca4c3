"""Metrics, as Prometheus reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trio_router.observe.hooks import Outcome, RequestRecord
from trio_router.observe.metrics import DURATION_BUCKETS, MAX_SERIES, Metrics, WorkerState, make_registry

FLEET = (
    WorkerState(name="p:1", role="prefill", model="tiny", ready=True, in_flight=3),
    WorkerState(name="d:1", role="decode", model="tiny", ready=False, in_flight=0),
)
RECORD = RequestRecord(
    request_id="one",
    outcome=Outcome.OK,
    attempts=1,
    prefill_worker="p:1",
    decode_worker="d:1",
    received_at=100.0,
    prefill_started_at=100.0,
    prefill_ended_at=100.25,
    decode_started_at=100.25,
    first_frame_at=100.5,
    ended_at=102.5,
    finish_reason="stop",
    prompt_tokens=18,
    output_tokens=5,
    client="chat",
)
ROUTE = {"router_type": "grpc", "backend_type": "pd", "connection_mode": "grpc", "model": "tiny", "endpoint": "chat"}
STREAM = {name: value for name, value in ROUTE.items() if name != "connection_mode"}


class Scrape:
    """What a scraper has after reading a registry once."""

    def __init__(self, metrics: Metrics) -> None:
        self.text = generate_latest(make_registry(metrics)).decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def series(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for sample, labels in self.samples if sample == name]


@pytest.fixture
def metrics() -> Metrics:
    watched = Metrics(lambda: FLEET)
    watched.worker_ready(worker="p:1", role="prefill", ready=True)
    return watched


def end(metrics: Metrics, **changes) -> None:
    metrics.request_started()
    metrics.request_ended(replace(RECORD, **changes))


class TestRequests:
    def test_a_request_is_in_flight_until_it_ends(self, metrics):
        metrics.request_started()
        assert Scrape(metrics).value("trio_router_requests_in_flight") == 1
        metrics.request_ended(RECORD)
        assert Scrape(metrics).value("trio_router_requests_in_flight") == 0

    def test_it_is_counted_by_route_and_by_how_it_ended(self, metrics):
        end(metrics)
        end(metrics, outcome=Outcome.CLIENT_LEFT)
        scrape = Scrape(metrics)
        assert scrape.value("smg_router_requests_total", **ROUTE) == 2
        assert scrape.value("trio_router_requests_ended_total", outcome="ok") == 1
        assert scrape.value("trio_router_requests_ended_total", outcome="client_left") == 1

    def test_a_refused_one_is_counted_by_its_code_and_was_never_in_flight(self, metrics):
        metrics.request_refused(request_id="a", client="chat", code="malformed_json")
        metrics.request_refused(request_id="b", client="http", code="route_not_found")
        scrape = Scrape(metrics)
        refused = "trio_router_requests_refused_total"
        assert scrape.value(refused, endpoint="chat", code="malformed_json") == 1
        assert scrape.value(refused, endpoint="http", code="route_not_found") == 1
        assert scrape.value("trio_router_requests_in_flight") == 0
        assert scrape.series("trio_router_requests_ended_total") == []

    def test_who_processes_media_is_counted_with_the_reason(self, metrics):
        for reason in ("auto_uniform", "auto_uniform", "config"):
            metrics.media_resolved(model="m", mode="worker", reason=reason)
        scrape = Scrape(metrics)
        assert scrape.value("smg_mm_processing_total", model="m", mode="worker", reason="auto_uniform") == 2
        assert scrape.value("smg_mm_processing_total", model="m", mode="worker", reason="config") == 1

    def test_http_responses_are_counted_by_status(self, metrics):
        metrics.http_responses = lambda: {404: 2, 200: 5}
        scrape = Scrape(metrics)
        assert scrape.value("trio_router_http_responses_total", status="200") == 5
        assert scrape.value("trio_router_http_responses_total", status="404") == 2

    def test_times_count_from_the_request_s_arrival(self, metrics):
        end(metrics)
        scrape = Scrape(metrics)
        assert scrape.value("smg_router_ttft_seconds_sum", **STREAM) == pytest.approx(0.5)
        assert scrape.value("smg_router_request_duration_seconds_sum", **ROUTE) == pytest.approx(2.5)
        assert "from the request's arrival" in scrape.families["smg_router_ttft_seconds"].documentation

    def test_time_per_token_is_over_the_tokens_after_the_first(self, metrics):
        end(metrics)
        assert Scrape(metrics).value("smg_router_tpot_seconds_sum", **STREAM) == pytest.approx(2.0 / 4)

    def test_one_token_has_no_time_per_token(self, metrics):
        end(metrics, output_tokens=1)
        scrape = Scrape(metrics)
        assert scrape.series("smg_router_tpot_seconds_sum") == []
        assert scrape.value("smg_router_ttft_seconds_count", **STREAM) == 1

    def test_tokens_are_those_of_requests_that_ended_well(self, metrics):
        end(metrics)
        end(metrics, outcome=Outcome.CLIENT_LEFT)
        scrape = Scrape(metrics)
        assert scrape.value("smg_router_tokens_total", **STREAM, token_type="input") == 18
        assert scrape.value("smg_router_tokens_total", **STREAM, token_type="output") == 5

    @pytest.mark.parametrize(
        ("outcome", "code", "error_type"),
        [(Outcome.FAILED, "prefill_stream_error", "prefill_stream_error"), (Outcome.TIMEOUT, None, "timeout")],
    )
    def test_failures_are_errors_by_their_code(self, metrics, outcome, code, error_type):
        end(metrics, outcome=outcome, error_code=code)
        assert Scrape(metrics).value("smg_router_request_errors_total", **ROUTE, error_type=error_type) == 1

    @pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.CLIENT_LEFT, Outcome.ABORTED])
    def test_what_a_client_decided_is_no_error(self, metrics, outcome):
        end(metrics, outcome=outcome)
        assert Scrape(metrics).series("smg_router_request_errors_total") == []

    def test_a_request_that_no_worker_took_has_an_unknown_model(self, metrics):
        end(metrics, outcome=Outcome.FAILED, error_code="no_available_workers", decode_worker=None)
        assert Scrape(metrics).value("smg_router_requests_total", **(ROUTE | {"model": "unknown"})) == 1


class TestHistograms:
    def test_buckets_are_cumulative_and_a_bound_belongs_to_its_bucket(self, metrics):
        for length in (0.001, 0.0011, 7200.0, 9999.0):
            end(metrics, ended_at=RECORD.received_at + length, outcome=Outcome.CLIENT_LEFT, received_at=100.0)
        scrape = Scrape(metrics)
        name = "smg_router_request_duration_seconds_bucket"
        bounds = [*map(str, DURATION_BUCKETS), "+Inf"]
        counts = [scrape.value(name, **ROUTE, le=bound) for bound in bounds]
        assert counts == sorted(counts)
        # 100.001 - 100.0 is a little above 0.001 in binary: it may fall into either of the first two buckets.
        assert counts[1] == 2
        assert counts[-1] == 4
        assert scrape.value("smg_router_request_duration_seconds_count", **ROUTE) == 4

    def test_an_exact_bound_counts_as_at_most(self, metrics):
        metrics.pair_dispatched(connector="nixl", prefill_seconds=0.25, handoff_seconds=0.002)
        labels = {"backend_type": "pd", "model": "tiny", "runtime": "vllm"}
        scrape = Scrape(metrics)
        assert scrape.value("smg_pd_prefill_duration_seconds_bucket", **labels, le="0.25") == 1
        assert scrape.value("smg_pd_prefill_duration_seconds_bucket", **labels, le="0.1") == 0


class TestPairs:
    def test_dispatched_pairs_missing_handoffs_and_their_ends_are_counted(self, metrics):
        metrics.pair_dispatched(connector="nixl", prefill_seconds=0.2, handoff_seconds=0.002)
        metrics.handoff_missing(worker="p:1")
        for outcome in ("consumed", "consumed", "released"):
            metrics.handoff_ended(outcome=outcome)
        scrape = Scrape(metrics)
        assert scrape.value("smg_pd_kv_connector_mode_total", mode="nixl") == 1
        assert scrape.value("smg_pd_kv_transfer_failures_total") == 1
        assert scrape.value("trio_router_handoffs_total", outcome="consumed") == 2
        assert scrape.value("trio_router_handoffs_total", outcome="released") == 1

    def test_the_way_from_prefill_to_decode_is_timed(self, metrics):
        metrics.pair_dispatched(connector="nixl", prefill_seconds=0.2, handoff_seconds=0.002)
        scrape = Scrape(metrics)
        labels = {"backend_type": "pd", "model": "tiny", "runtime": "vllm"}
        assert scrape.value("smg_pd_kv_transfer_duration_seconds_sum", **labels) == pytest.approx(0.002)
        assert scrape.value("smg_pd_kv_transfer_duration_seconds_count", **labels) == 1

    def test_decode_s_own_time_to_its_first_token_is_that_of_pairs(self, metrics):
        metrics.request_ended(RECORD)
        metrics.request_ended(replace(RECORD, prefill_worker=None))
        scrape = Scrape(metrics)
        labels = {"backend_type": "pd", "model": "tiny", "runtime": "vllm"}
        assert scrape.value("smg_pd_decode_ttft_seconds_sum", **labels) == pytest.approx(0.25)
        assert scrape.value("smg_pd_decode_ttft_seconds_count", **labels) == 1

    def test_what_became_of_media_identities_is_counted(self, metrics):
        for outcome in ("applied", "applied", "missing"):
            metrics.media_judged(request_id="r", outcome=outcome, detail=None)
        assert Scrape(metrics).value("trio_router_media_identities_total", outcome="applied") == 2

    def test_the_janitor_s_jobs_are_a_gauge(self, metrics):
        metrics.janitor_jobs(2)
        metrics.janitor_jobs(1)
        assert Scrape(metrics).value("trio_router_janitor_jobs") == 1

    def test_counters_that_have_not_counted_are_there_from_the_start(self, metrics):
        assert Scrape(metrics).value("smg_pd_kv_transfer_failures_total") == 0


class TestWorkers:
    def test_their_state_is_read_at_the_scrape(self, metrics):
        scrape = Scrape(metrics)
        assert scrape.value("smg_worker_requests_active", worker="p:1") == 3
        assert scrape.value("smg_worker_health", worker="p:1") == 1
        assert scrape.value("smg_worker_health", worker="d:1") == 0

    def test_failed_attempts_are_retries_or_the_end(self, metrics):
        metrics.attempt_failed(worker="p:1", role="prefill", code="prefill_stream_error", will_retry=True)
        metrics.attempt_failed(worker="d:1", role="decode", code="worker_stream_failed", will_retry=False)
        scrape = Scrape(metrics)
        assert scrape.value("smg_worker_retries_total", worker_type="prefill") == 1
        assert scrape.value("smg_worker_retries_exhausted_total", worker_type="decode") == 1


class TestCardinality:
    def test_ids_and_unknown_callers_make_no_series(self, metrics):
        for number in range(1000):
            end(metrics, request_id=f"id-{number}", client=f"client-{number}")
        [labels] = Scrape(metrics).series("smg_router_requests_total")
        assert labels == ROUTE | {"endpoint": "other"}

    def test_a_family_has_a_cap_and_counts_the_rest_as_other(self, metrics):
        end(metrics, outcome=Outcome.FAILED, error_code="real")
        for number in range(50_000):
            end(metrics, outcome=Outcome.FAILED, error_code=f"made-up-{number}")
        end(metrics, outcome=Outcome.FAILED, error_code="real")
        scrape = Scrape(metrics)
        errors = [value for (name, _), value in scrape.samples.items() if name == "smg_router_request_errors_total"]
        assert len(errors) == MAX_SERIES + 1
        assert sum(errors) == 50_002
        assert scrape.value("smg_router_request_errors_total", **ROUTE, error_type="real") == 2


def test_every_registry_is_its_own(metrics):
    end(metrics)
    assert Scrape(Metrics()).series("smg_router_requests_total") == []
    assert "process_resident_memory_bytes" in Scrape(metrics).families
