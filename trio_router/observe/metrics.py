"""Metrics: an observer that counts in plain dictionaries, and a collector that turns them into Prometheus' form.

Counting costs a dictionary entry; names, labels and text are made when somebody scrapes. Label values come from
closed sets or from the configuration, never from what a client wrote, and every family has a cap on its series.
Names that begin with smg_ are those of the SMG gateway, for the dashboards that exist; where a meaning differs the
help text says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .hooks import Observer, Outcome, RequestRecord

Labels = tuple[str, ...]

DURATION_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0),
    *(180.0, 240.0, 300.0, 480.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0),
)
MAX_SERIES: Final = 512
"""Of one family. What would be more is counted under the label value "other"."""
OTHER: Final = "other"

# Which endpoint a caller stands for; callers are the fronts, so the set is closed.
_ENDPOINTS: Final = {
    "chat": "chat",
    "completions": "completions",
    "grpc": "generate",
    "embedded": "embedded",
    "http": "http",
}
_ENDED_BY_CLIENT: Final = frozenset({Outcome.OK, Outcome.CLIENT_LEFT, Outcome.ABORTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at the moment of a scrape."""

    name: str
    role: str
    model: str
    ready: bool
    in_flight: int
    breaker: str = "closed"
    tokens_in_flight: int = 0


class Counts:
    """A counter with labels."""

    def __init__(self) -> None:
        self.by_labels: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        labels = _bounded(labels, self.by_labels)
        self.by_labels[labels] = self.by_labels.get(labels, 0) + amount


class Durations:
    """A histogram with labels: counts per bucket, not yet summed up, and the sum of what was seen."""

    def __init__(self, bounds: Sequence[float] = DURATION_BUCKETS) -> None:
        self.bounds = tuple(bounds)
        self.by_labels: dict[Labels, tuple[list[int], list[float]]] = {}

    def add(self, labels: Labels, seconds: float) -> None:
        labels = _bounded(labels, self.by_labels)
        counts, total = self.by_labels.setdefault(labels, ([0] * (len(self.bounds) + 1), [0.0]))
        counts[bisect_left(self.bounds, seconds)] += 1
        total[0] += seconds

    def buckets(self, counts: Iterable[int]) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        seen = 0
        cumulative: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), counts, strict=True):
            seen += count
            cumulative.append((bound, seen))
        return cumulative


def _bounded(labels: Labels, known: Mapping[Labels, object]) -> Labels:
    if labels in known or len(known) < MAX_SERIES:
        return labels
    return tuple(OTHER for _ in labels)


class Metrics(Observer):
    """Counts what the router tells. `workers` is asked for the fleet when a worker comes or goes, and at a scrape; so
    is `http_responses`, for how many responses have had which status.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerState]] = tuple) -> None:
        self.workers = workers
        self.http_responses: Callable[[], Mapping[int, int]] = dict
        self.live_handoffs: Callable[[], int] = int
        self._models: dict[str, str] = {}
        self._disaggregated = False
        self.in_flight = 0
        self.janitor = 0
        self.requests = Counts()
        self.outcomes = Counts()
        self.refused = Counts()
        self.durations = Durations()
        self.errors = Counts()
        self.ttft = Durations()
        self.tpot = Durations()
        self.tokens = Counts()
        self.media = Counts()
        self.prefill = Durations()
        self.transfer = Durations()
        self.decode_ttft = Durations()
        self.connectors = Counts()
        self.missing_handoffs = 0
        self.handoffs = Counts()
        self.skipped = Counts()
        self.breakers = Counts()
        self.identities = Counts()
        self.retries = Counts()
        self.exhausted = Counts()

    def request_started(self) -> None:
        self.in_flight += 1

    def request_ended(self, record: RequestRecord) -> None:
        self.in_flight -= 1
        model = self._models.get(record.decode_worker or "", "unknown")
        backend = "pd" if self._disaggregated else "regular"
        endpoint = _ENDPOINTS.get(record.client, OTHER)
        route = ("grpc", backend, "grpc", model, endpoint)
        self.requests.add(route)
        self.outcomes.add((record.outcome.value,))
        self.durations.add(route, record.ended_at - record.received_at)
        if record.outcome not in _ENDED_BY_CLIENT:
            self.errors.add((*route, record.error_code or record.outcome.value))
        if record.outcome is Outcome.OK and record.first_frame_at is not None:
            self._count_generation(record, ("grpc", backend, model, endpoint), first=record.first_frame_at)

    def _count_generation(self, record: RequestRecord, labels: Labels, *, first: float) -> None:
        self.ttft.add(labels, first - record.received_at)
        if record.prefill_worker is not None and record.decode_started_at is not None:
            self.decode_ttft.add(("pd", labels[2], "vllm"), first - record.decode_started_at)
        if record.output_tokens > 1:
            self.tpot.add(labels, (record.ended_at - first) / (record.output_tokens - 1))
        self.tokens.add((*labels, "input"), record.prompt_tokens)
        self.tokens.add((*labels, "output"), record.output_tokens)

    def request_refused(self, *, request_id: str, client: str, code: str) -> None:
        self.refused.add((_ENDPOINTS.get(client, OTHER), code))

    def media_resolved(self, *, model: str, mode: str, reason: str) -> None:
        self.media.add((model, mode, reason))

    def attempt_failed(self, *, worker: str, role: str, code: str, will_retry: bool) -> None:
        (self.retries if will_retry else self.exhausted).add((role,))

    def pair_dispatched(self, *, connector: str, prefill_seconds: float, handoff_seconds: float) -> None:
        self.connectors.add((connector,))
        labels = ("pd", self._only_model(), "vllm")
        self.prefill.add(labels, prefill_seconds)
        self.transfer.add(labels, handoff_seconds)

    def handoff_missing(self, *, worker: str) -> None:
        self.missing_handoffs += 1

    def prefill_skipped(self, *, reason: str) -> None:
        self.skipped.add((reason,))

    def media_judged(self, *, request_id: str, outcome: str, detail: str | None) -> None:
        self.identities.add((outcome,))

    def breaker_changed(self, *, worker: str, state: str) -> None:
        self.breakers.add((worker, state))

    def handoff_ended(self, *, outcome: str) -> None:
        self.handoffs.add((outcome,))

    def janitor_jobs(self, count: int) -> None:
        self.janitor = count

    def worker_ready(self, *, worker: str, role: str, ready: bool) -> None:
        self.fleet()

    def fleet(self) -> Sequence[WorkerState]:
        """Ask for the workers, and remember what they serve."""
        workers = self.workers()
        self._models = {worker.name: worker.model for worker in workers}
        self._disaggregated = any(worker.role == "prefill" for worker in workers)
        return workers

    def _only_model(self) -> str:
        models = set(self._models.values())
        return models.pop() if len(models) == 1 else OTHER


_BREAKER_VALUES: Final = {"closed": 0, "open": 1, "half_open": 2}
_ROUTE: Final = ("router_type", "backend_type", "connection_mode", "model", "endpoint")
_PAIR: Final = ("backend_type", "model", "runtime")
_STREAM: Final = ("router_type", "backend_type", "model", "endpoint")


class MetricsCollector(Collector):
    """Reads a `Metrics` whenever Prometheus asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._router_families()
        yield from self._pair_families()
        yield from self._worker_families()

    def _router_families(self) -> Iterator[Metric]:
        m = self._metrics
        yield _counter("smg_router_requests", "Requests, counted when they end", _ROUTE, m.requests)
        yield _counter("trio_router_requests_ended", "Requests by how they ended", ("outcome",), m.outcomes)
        yield _counter(
            "trio_router_requests_refused",
            "Requests answered with an error before they were accepted, by its code",
            ("endpoint", "code"),
            m.refused,
        )
        yield _responses(m.http_responses())
        yield _histogram(
            "smg_router_request_duration_seconds", "From a request's arrival to its end", _ROUTE, m.durations
        )
        yield _counter(
            "smg_router_request_errors", "Requests that failed or ran out of time", (*_ROUTE, "error_type"), m.errors
        )
        yield _histogram(
            "smg_router_ttft_seconds",
            "Time to first token: from the request's arrival at this router (prefill and handoff included) to the first"
            " frame from its decode worker; requests that ended well",
            _STREAM,
            m.ttft,
        )
        yield _histogram(
            "smg_router_tpot_seconds",
            "Time per output token after the first; requests that ended well with more than one token",
            _STREAM,
            m.tpot,
        )
        yield _counter("smg_router_tokens", "Tokens of requests that ended well", (*_STREAM, "token_type"), m.tokens)
        yield _counter(
            "smg_mm_processing",
            "Requests with media, by who processes them and why",
            ("model", "mode", "reason"),
            m.media,
        )
        yield GaugeMetricFamily("trio_router_requests_in_flight", "Requests under way", value=m.in_flight)
        yield GaugeMetricFamily(
            "trio_router_janitor_jobs", "Legs and handoffs that outlived their request", value=m.janitor
        )

    def _pair_families(self) -> Iterator[Metric]:
        m = self._metrics
        yield _histogram(
            "smg_pd_prefill_duration_seconds",
            "Length of a prefill leg, counted once its decode leg was dispatched",
            _PAIR,
            m.prefill,
        )
        yield _histogram(
            "smg_pd_kv_transfer_duration_seconds",
            "From the end of a prefill leg to the moment its decode leg was dispatched",
            _PAIR,
            m.transfer,
        )
        yield _histogram(
            "smg_pd_decode_ttft_seconds",
            "From the dispatch of a pair's decode leg to its first frame; requests that ended well",
            _PAIR,
            m.decode_ttft,
        )
        yield _counter(
            "smg_pd_kv_connector_mode",
            "Pairs dispatched, by the prefill worker's KV connector",
            ("mode",),
            m.connectors,
        )
        failures = CounterMetricFamily(
            "smg_pd_kv_transfer_failures", "Prefill legs that were asked for a handoff and returned none"
        )
        failures.add_metric((), m.missing_handoffs)
        yield failures
        yield _counter("trio_router_handoffs", "Handoffs by how they ended", ("outcome",), m.handoffs)
        yield GaugeMetricFamily("trio_router_handoffs_live", "Handoffs that have not ended", value=m.live_handoffs())
        yield _counter(
            "trio_router_media_identities",
            "Decode legs with media, by whether the prefill worker's identity stood in for them",
            ("outcome",),
            m.identities,
        )
        yield _counter(
            "trio_router_prefill_skipped", "Attempts that a decode worker served whole, by why", ("reason",), m.skipped
        )

    def _worker_families(self) -> Iterator[Metric]:
        active = GaugeMetricFamily("smg_worker_requests_active", "Slots in use on a worker", labels=("worker",))
        tokens = GaugeMetricFamily(
            "trio_router_worker_prompt_tokens_active",
            "Prompt tokens of the slots in use on a worker; media are taken to be of usual sizes",
            labels=("worker",),
        )
        health = GaugeMetricFamily("smg_worker_health", "1 while a worker gets requests, else 0", labels=("worker",))
        breaker = GaugeMetricFamily(
            "smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half open", labels=("worker",)
        )
        for worker in self._metrics.fleet():
            active.add_metric((worker.name,), worker.in_flight)
            tokens.add_metric((worker.name,), worker.tokens_in_flight)
            health.add_metric((worker.name,), int(worker.ready))
            breaker.add_metric((worker.name,), _BREAKER_VALUES.get(worker.breaker, 0))
        yield active
        yield tokens
        yield health
        yield breaker
        yield _counter(
            "smg_worker_cb_transitions", "Changes of a circuit breaker", ("worker", "to"), self._metrics.breakers
        )
        yield _counter(
            "smg_worker_retries",
            "Failed attempts that were followed by another",
            ("worker_type",),
            self._metrics.retries,
        )
        yield _counter(
            "smg_worker_retries_exhausted",
            "Failed attempts that ended their request",
            ("worker_type",),
            self._metrics.exhausted,
        )


def _counter(name: str, text: str, labels: Sequence[str], counts: Counts) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.by_labels.items():
        family.add_metric(values, count)
    return family


def _responses(counts: Mapping[int, int]) -> CounterMetricFamily:
    family = CounterMetricFamily("trio_router_http_responses", "HTTP responses begun, by status", labels=("status",))
    for status, count in sorted(counts.items()):
        family.add_metric((str(status),), count)
    return family


def _histogram(name: str, text: str, labels: Sequence[str], durations: Durations) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, (counts, total) in durations.by_labels.items():
        family.add_metric(values, buckets=durations.buckets(counts), sum_value=total[0])
    return family


def make_registry(metrics: Metrics) -> CollectorRegistry:
    """A registry of these metrics and the process's own; nothing global."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    ProcessCollector(registry=registry)
    return registry
