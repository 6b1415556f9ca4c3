"""The embeddable router: workers, the janitor and the requests under way, tied together. No server, no HTTP."""

from __future__ import annotations

import logging
import math
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio
from grpclib.exceptions import GRPCError

from ..errors import ConfigError, RequestAborted, RequestTimeout, RouterError, WorkerUnavailable
from ..fleet.client import WorkerClient
from ..fleet.registry import ProbeSettings, Registry
from ..fleet.worker import Lease, Worker, WorkerRole, WorkerSpec
from ..observe.hooks import Observer, Outcome
from ..policy.round_robin import RoundRobin
from ..protocol.codec import decode, encode
from ..protocol.messages import GenerateRequest, GenerateResponse
from ..rpc.channel import ChannelSettings, connect_channel
from ..rpc.transport import Dialer, dial_tcp
from ..scopes import plain_errors
from .attempt import Attempt, AttemptState, retryable
from .janitor import Janitor, JanitorSettings
from .legs import RequestView, parse_request
from .retry import RetrySettings, backoff
from .stream import GenerateStream
from .timeline import Timeline

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything `open_router` needs. Times are seconds.

    `workers` are either prefill and decode workers, or plain ones. `fresh_fraction` is the share of its lease up to
    which a handoff may still be offered.
    """

    workers: tuple[WorkerSpec, ...] = ()
    request_timeout: float = 1800.0
    fresh_fraction: float = 0.7
    retry: RetrySettings = field(default_factory=RetrySettings)
    janitor: JanitorSettings = field(default_factory=JanitorSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    channel: ChannelSettings = field(default_factory=ChannelSettings)

    def validate(self) -> None:
        """Raise ConfigError, naming the setting, for a fleet that could never serve a request."""
        roles = {spec.role for spec in self.workers}
        if not roles:
            raise ConfigError("no workers: give --prefill and --decode URLs, or --worker-urls")
        if WorkerRole.PLAIN in roles and len(roles) > 1:
            raise ConfigError("--worker-urls cannot be mixed with --prefill and --decode: run two routers")
        if len(roles) == 1 and WorkerRole.PLAIN not in roles:
            given = next(iter(roles)).value
            raise ConfigError(f"only {given} workers are configured: a pair needs --prefill and --decode")
        urls = [spec.address for spec in self.workers]
        twice = next((url for url in urls if urls.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"worker {twice} is configured twice")


class _Live:
    """A request under way: its scope, and why somebody else ended it."""

    __slots__ = ("attempt", "client_id", "ended_as", "scope")

    def __init__(self, client_id: str, *, deadline: float) -> None:
        self.client_id = client_id
        self.scope = trio.CancelScope(deadline=deadline)
        self.attempt: Attempt | None = None
        self.ended_as: Outcome | None = None

    @property
    def streaming(self) -> bool:
        return self.attempt is not None and self.attempt.state is AttemptState.STREAMING


class Router:
    """Made by `open_router`; `generate` may be called from any number of tasks."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        registry: Registry,
        janitor: Janitor,
        observer: Observer,
        new_id: Callable[[], str],
        chance: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.janitor = janitor
        self._settings = settings
        self._observer = observer
        self._new_id = new_id
        self._chance = chance
        self._live: dict[_Live, None] = {}

    def __repr__(self) -> str:
        return f"<Router {self.in_flight} requests, {self.janitor!r}, {self.registry!r}>"

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._live)

    @property
    def ready(self) -> bool:
        """Whether every leg has a worker to go to."""
        return self.registry.ready

    def models(self) -> list[str]:
        """Names of the models that can be served now."""
        return self.registry.models()

    async def wait_ready(self) -> None:
        """Return when `ready`. Put a timeout around it."""
        await self.registry.wait_ready()

    async def tokenizer_bundle(self) -> tuple[bytes, str]:
        """The tokenizer archive of the first ready worker that gives one, with its claimed SHA-256.

        Raises WorkerUnavailable when none does.
        """
        reason = "no worker is ready"
        for worker in self.registry.workers:
            if not worker.ready:
                continue
            try:
                return await worker.client.tokenizer_bundle()
            except (GRPCError, RouterError) as exc:
                reason = f"{worker.name}: {exc}"
        raise WorkerUnavailable(f"no worker gave a tokenizer ({reason})", code="tokenizer_not_ready")

    @asynccontextmanager
    async def generate(
        self,
        request: GenerateRequest | bytes,
        *,
        timeout: float | None = None,
        model: str | None = None,
        client: str = "embedded",
    ) -> AsyncIterator[GenerateStream]:
        """Run a request; the block gets its stream once the first frame is here.

        Leaving the block, by whatever way, ends the request: legs, slots and the handoff have found their next owner
        before this returns, without waiting. `timeout` (seconds, at most the router's own) bounds the whole block.
        `client` names the caller in records. Raises a RouterError before the block when no attempt succeeded,
        RequestTimeout when time is up, RequestAborted when `abort` ended it.
        """
        now = trio.current_time()
        message = request if isinstance(request, bytes) else encode(request)
        view = parse_request(message, disaggregated=self.registry.disaggregated)
        client_id = view.client_id or self._new_id()
        limit = min(self._settings.request_timeout, math.inf if timeout is None else timeout)
        live = _Live(client_id, deadline=now + limit)
        timeline = Timeline(request_id=client_id, received_at=now)
        self._live[live] = None
        self._observer.request_started()
        outcome, code = Outcome.CLIENT_LEFT, None
        try:
            with live.scope:
                attempt = await self._first_frame(live, view, timeline=timeline, model=model)
                assert attempt.call is not None  # noqa: S101  # for the type checker: it has a first frame
                stream = GenerateStream(attempt.call, request_id=client_id, timeline=timeline, choices=view.n)
                yield stream
                if stream.ended_well:
                    outcome = Outcome.OK
                self._note_end(stream, timeline)
            if live.scope.cancelled_caught:
                outcome = live.ended_as or Outcome.TIMEOUT
                code = _ENDED_BY_SCOPE[outcome].code
                raise _ENDED_BY_SCOPE[outcome](f"request {client_id}: {_WHY[outcome]}")
        except RouterError as exc:
            outcome, code = (Outcome.FAILED if outcome is Outcome.CLIENT_LEFT else outcome), exc.error_code
            raise
        except Exception:
            outcome, code = Outcome.FAILED, RouterError.code
            raise
        finally:
            if live.attempt is not None:
                live.attempt.leave()
            del self._live[live]
            self._observer.request_ended(
                timeline.record(outcome, now=trio.current_time(), error_code=code, client=client)
            )

    async def abort(self, client_ids: list[str]) -> int:
        """End requests by the ids their clients gave; returns how many there were.

        A request that streams is aborted at its worker and ends there with finish reason `abort`; one that has no
        frame yet raises RequestAborted in its task.
        """
        wanted = set(client_ids)
        found = [live for live in self._live if live.client_id in wanted]
        for live in found:
            if not live.streaming:
                live.ended_as = Outcome.ABORTED
                live.scope.cancel()
        for live in found:
            if live.streaming and live.attempt is not None:
                await self._abort_at_worker(live.attempt)
        return len(found)

    async def _abort_at_worker(self, attempt: Attempt) -> None:
        worker = attempt.workers[-1]
        try:
            await worker.client.abort([attempt.attempt_id])
        except (GRPCError, RouterError) as exc:
            _log.warning("abort of %s on %s failed: %s", attempt.attempt_id, worker.name, exc)

    async def _first_frame(self, live: _Live, view: RequestView, *, timeline: Timeline, model: str | None) -> Attempt:
        """Try until a first frame is here; the attempt that has it stays in `live`."""
        settings = self._settings.retry
        failed: list[str] = timeline.workers_tried
        for failures in range(1, settings.attempts + 1):
            attempt = self._reserve(view, live.client_id, timeline=timeline, model=model, failed=failed)
            live.attempt = attempt
            try:
                await attempt.first_frame()
            except RouterError as exc:
                blamed = attempt.blamed
                attempt.leave()
                goes_on = retryable(exc) and failures < settings.attempts
                self._observer.attempt_failed(
                    worker=blamed.name, role=blamed.spec.role.value, code=exc.error_code, will_retry=goes_on
                )
                failed.append(blamed.name)
                if not goes_on:
                    raise
            else:
                return attempt
            await trio.sleep(backoff(settings, failures=failures, chance=self._chance()))
        raise AssertionError("unreachable: the last attempt raises")

    def _reserve(
        self, view: RequestView, client_id: str, *, timeline: Timeline, model: str | None, failed: list[str]
    ) -> Attempt:
        """Choose workers and reserve their slots; the decode slot is held before prefill begins (I5)."""
        timeline.begin_attempt()
        prefill: Lease | None = None
        if self.registry.disaggregated:
            decode = self.registry.take(WorkerRole.DECODE, model=model, failed=failed)
            # A handoff has one consumer: several samples would free the blocks under each other, so they recompute.
            if view.n <= 1:
                try:
                    prefill = self.registry.take(WorkerRole.PREFILL, model=model, failed=failed)
                except RouterError:
                    decode.release()
                    raise
        else:
            decode = self.registry.take(WorkerRole.PLAIN, model=model, failed=failed)
        return Attempt(
            view,
            attempt_id=f"{client_id}-{self._new_id()}",
            decode=decode,
            prefill=prefill,
            janitor=self.janitor,
            observer=self._observer,
            timeline=timeline,
            fresh_fraction=self._settings.fresh_fraction,
        )

    @staticmethod
    def _note_end(stream: GenerateStream, timeline: Timeline) -> None:
        if not stream.completes:
            return
        last = decode(GenerateResponse, stream.completes[-1]).complete
        timeline.finish_reason = last.finish_reason
        timeline.prompt_tokens = timeline.prompt_tokens or last.prompt_tokens


_ENDED_BY_SCOPE: Final[dict[Outcome, type[RouterError]]] = {
    Outcome.TIMEOUT: RequestTimeout,
    Outcome.ABORTED: RequestAborted,
}
_WHY: Final = {Outcome.TIMEOUT: "its deadline has passed", Outcome.ABORTED: "aborted by its client"}


def random_id() -> str:
    """A short unique id; simulations pass a counted one instead."""
    return uuid.uuid4().hex[:16]


@asynccontextmanager
async def open_router(
    settings: RouterSettings,
    *,
    dialer: Dialer = dial_tcp,
    observer: Observer | None = None,
    new_id: Callable[[], str] = random_id,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[Router]:
    """A router that lives as long as the block: it dials workers, watches them, and cleans up after requests.

    On exit requests are expected to have ended; the janitor gets `settings.janitor.exit_grace` seconds, shielded,
    for what they left. `new_id` and `chance` are the only sources of randomness. Raises ConfigError for a fleet that
    cannot work.
    """
    settings.validate()
    # The codec makes a class's tables at its first use, some 10 ms for these: not on the first client's time.
    decode(GenerateResponse, encode(GenerateResponse()))
    decode(GenerateRequest, encode(GenerateRequest()))
    watcher = observer or Observer()
    with plain_errors():
        async with trio.open_nursery() as nursery:
            workers = [_make_worker(spec, nursery, dialer=dialer, settings=settings) for spec in settings.workers]
            janitor = Janitor(nursery, settings=settings.janitor, observer=watcher, new_id=new_id)
            registry = Registry(workers, policies={role: RoundRobin() for role in WorkerRole}, observer=watcher)
            for worker in workers:
                nursery.start_soon(_watch, registry, worker, settings.probe)
            router = Router(
                settings, registry=registry, janitor=janitor, observer=watcher, new_id=new_id, chance=chance
            )
            try:
                yield router
            finally:
                # What requests left behind still speaks to workers: a bounded grace, whoever is cancelling us.
                with trio.CancelScope(deadline=trio.current_time() + settings.janitor.exit_grace, shield=True):
                    await janitor.wait_idle()
                nursery.cancel_scope.cancel()


def _make_worker(spec: WorkerSpec, nursery: trio.Nursery, *, dialer: Dialer, settings: RouterSettings) -> Worker:
    channel = connect_channel(nursery, spec.address, dialer=dialer, settings=settings.channel)
    return Worker(spec, client=WorkerClient(channel))


async def _watch(registry: Registry, worker: Worker, settings: ProbeSettings) -> None:
    await registry.watch(worker, settings=settings)
