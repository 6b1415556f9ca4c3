"""The embeddable router: workers, the janitor and the requests under way, tied together. No server, no HTTP."""

from __future__ import annotations

import logging
import math
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import trio
from grpclib.exceptions import GRPCError

from ..errors import ConfigError, RequestAborted, RouterError, WorkerUnavailable
from ..fleet.client import WorkerClient
from ..fleet.registry import ProbeSettings, Registry
from ..fleet.worker import Worker, WorkerRole, WorkerSpec
from ..observe.hooks import Observer, Outcome
from ..policy.breaker import BreakerSettings
from ..policy.round_robin import RoundRobin
from ..protocol.codec import decode, encode
from ..protocol.messages import GenerateRequest, GenerateResponse
from ..rpc.channel import ChannelSettings, ChannelState, StateChange, connect_channel
from ..rpc.endpoint import dial
from ..rpc.tls import ClientTls
from ..rpc.transport import Dialer
from ..scopes import plain_errors
from .attempts import Attempts
from .handoff import HandoffBook, HandoffSettings, OnEmptyPrefill
from .janitor import Janitor, JanitorSettings
from .legs import RequestView, parse_request
from .live import LiveRequest
from .retry import RetrySettings
from .stream import GenerateStream
from .timeline import Timeline

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything `open_router` needs. Times are seconds.

    `workers` are either prefill and decode workers, or plain ones. `channel.tls` is for the workers whose URL asks for
    TLS, and for no other.
    """

    workers: tuple[WorkerSpec, ...] = ()
    request_timeout: float = 1800.0
    handoff: HandoffSettings = field(default_factory=HandoffSettings)
    retry: RetrySettings = field(default_factory=RetrySettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    janitor: JanitorSettings = field(default_factory=JanitorSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    channel: ChannelSettings = field(default_factory=ChannelSettings)

    def validate(self) -> None:
        """Raise ConfigError, naming the setting, for a fleet that could never serve a request."""
        self.retry.validate()
        self.handoff.validate()
        self.breaker.validate()
        roles = {spec.role for spec in self.workers}
        if not roles:
            raise ConfigError("no workers: give --prefill and --decode URLs, or --worker-urls")
        if WorkerRole.PLAIN in roles and len(roles) > 1:
            raise ConfigError("--worker-urls cannot be mixed with --prefill and --decode: run two routers")
        if len(roles) == 1 and WorkerRole.PLAIN not in roles:
            given = next(iter(roles)).value
            raise ConfigError(f"only {given} workers are configured: a pair needs --prefill and --decode")
        urls = [spec.name for spec in self.workers]
        twice = next((url for url in urls if urls.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"worker {twice} is configured twice")
        if any(spec.tls for spec in self.workers):
            (self.channel.tls or ClientTls()).validate()
        elif self.channel.tls is not None:
            raise ConfigError("TLS to workers is set up, and no worker's URL begins with grpcs://")

    def channel_to(self, spec: WorkerSpec) -> ChannelSettings:
        """`channel` as it is for this worker."""
        return replace(self.channel, tls=(self.channel.tls or ClientTls()) if spec.tls else None)


class Router:
    """Made by `open_router`; `generate` may be called from any number of tasks."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        registry: Registry,
        janitor: Janitor,
        handoffs: HandoffBook,
        attempts: Attempts,
        observer: Observer,
        new_id: Callable[[], str],
    ) -> None:
        self.registry = registry
        self.janitor = janitor
        self.handoffs = handoffs
        self._settings = settings
        self._attempts = attempts
        self._observer = observer
        self._new_id = new_id
        self._live: dict[LiveRequest, None] = {}
        self.retired = False
        self._closed = False
        self._quiet = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<Router {self.in_flight} requests, {self.janitor!r}, {self.registry!r}>"

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._live)

    @property
    def ready(self) -> bool:
        """Whether clients should come here: every leg has a worker to go to, and the router has not been retired."""
        return self.registry.ready and not self.retired

    def models(self) -> list[str]:
        """Names of the models that can be served now."""
        return self.registry.models()

    async def wait_ready(self) -> None:
        """Return when every leg has a worker to go to. Put a timeout around it."""
        await self.registry.wait_ready()

    async def tokenizer_bundle(self, model: str | None = None) -> tuple[bytes, str]:
        """The tokenizer archive, with its claimed SHA-256, of the first ready worker that gives one; of this model's if
        one is named.

        Raises WorkerUnavailable when none does.
        """
        reason = "no worker is ready"
        for worker in self.registry.workers:
            facts = worker.facts
            if not worker.ready or facts is None or model not in (None, facts.model):
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
        view = self._read(request, client=client)
        # For as long as the stream runs, its bytes may go: the caller decides whether they do.
        del request
        client_id = view.client_id or self._new_id()
        limit = min(self._settings.request_timeout, math.inf if timeout is None else timeout)
        live = LiveRequest(client_id, deadline=now + limit, timeline=Timeline(request_id=client_id, received_at=now))
        self._live[live] = None
        self._observer.request_started()
        try:
            with live.scope:
                # One whose time was up before it came costs no worker anything.
                await trio.lowlevel.checkpoint_if_cancelled()
                stream = await self._attempts.first_frame(live, view, model=model)
                yield stream
                live.note_stream(stream)
            live.check_scope()
        except trio.Cancelled:
            live.note_cancelled()
            raise
        except RouterError as exc:
            live.note_failed(exc.error_code)
            raise
        except Exception:
            live.note_failed(RouterError.code)
            raise
        finally:
            self._end(live, client=client)

    def _read(self, request: GenerateRequest | bytes, *, client: str) -> RequestView:
        message = request if isinstance(request, bytes) else encode(request)
        try:
            view = parse_request(message, disaggregated=self.registry.disaggregated)
            if self._closed:
                raise _shutting_down()
        except RouterError as exc:
            self._observer.request_refused(request_id="", client=client, code=exc.error_code)
            raise
        return view

    def _end(self, live: LiveRequest, *, client: str) -> None:
        """The one place where a request ends (I8)."""
        del self._live[live]
        if live.attempt is not None:
            live.attempt.leave()
        self._observer.request_ended(
            live.timeline.record(live.outcome, now=trio.current_time(), error_code=live.code, client=client)
        )
        if not self._live:
            self._quiet.unpark_all()

    async def abort(self, client_ids: list[str]) -> int:
        """End requests by the ids their clients gave; returns how many there were.

        A request that streams is aborted at its worker and ends there with finish reason `abort`; one that has no
        frame yet, or whose worker cannot be told, raises RequestAborted in its task.
        """
        wanted = set(client_ids)
        found = [live for live in self._live if live.client_id in wanted]
        streaming: dict[Worker, list[LiveRequest]] = {}
        for live in found:
            if live.attempt is not None and live.streaming:
                streaming.setdefault(live.attempt.decode.worker, []).append(live)
            else:
                _abort_here(live)
        async with trio.open_nursery() as nursery:
            for worker, requests in streaming.items():
                nursery.start_soon(_abort_at, worker, requests)
        return len(found)

    def retire(self) -> None:
        """Be not `ready` from now on, and serve all the same: for balancers, which go on sending until they know."""
        self.retired = True

    def shut_down(self) -> None:
        """Take no new request, and end those under way with an error that says so."""
        self.retired = self._closed = True
        for live in self._live:
            live.end(Outcome.FAILED, _shutting_down())

    async def wait_quiet(self) -> None:
        """Return when no request is under way and nothing is left to clean up after any."""
        while self._live:
            await self._quiet.park()
        await self.janitor.wait_idle()


def _shutting_down() -> WorkerUnavailable:
    return WorkerUnavailable("this router is shutting down", code="shutting_down")


def _abort_here(live: LiveRequest) -> None:
    live.end(Outcome.ABORTED, RequestAborted(f"request {live.client_id}: aborted by its client"))


async def _abort_at(worker: Worker, requests: list[LiveRequest]) -> None:
    """Have a worker abort what it streams; where it cannot be told, end it here."""
    ids = [live.attempt.attempt_id for live in requests if live.attempt is not None]
    for live in requests:
        live.abort_asked = True
    try:
        await worker.client.abort(ids)
    except (GRPCError, RouterError) as exc:
        _log.warning("abort of %d requests on %s failed, ending them here: %s", len(ids), worker.name, exc)
        for live in requests:
            _abort_here(live)


def random_id() -> str:
    """A short unique id; simulations pass a counted one instead."""
    return uuid.uuid4().hex[:16]


@asynccontextmanager
async def open_router(
    settings: RouterSettings,
    *,
    dialer: Dialer = dial,
    observer: Observer | None = None,
    new_id: Callable[[], str] = random_id,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[Router]:
    """A router that lives as long as the block: it dials workers, watches them, and cleans up after requests.

    On exit, requests that other tasks still run are ended; they and the janitor, for what they leave, get
    `settings.janitor.exit_grace` seconds, whoever cancels us. `new_id` and `chance` are the only sources of randomness.
    Raises ConfigError for a fleet that cannot work.
    """
    settings.validate()
    # The codec makes a class's tables at its first use, some 10 ms for these: not on the first client's time.
    decode(GenerateResponse, encode(GenerateResponse()))
    decode(GenerateRequest, encode(GenerateRequest()))
    watcher = observer or Observer()
    with plain_errors():
        async with trio.open_nursery() as nursery:
            # Links and the janitor's jobs must outlive whoever cancels us, for as long as the grace below.
            background: trio.Nursery = await nursery.start(_hold_nursery)
            workers = [
                _make_worker(spec, background, dialer=dialer, settings=settings, observer=watcher, chance=chance)
                for spec in settings.workers
            ]
            router = _assemble(workers, background, settings=settings, observer=watcher, new_id=new_id, chance=chance)
            for worker in workers:
                background.start_soon(_watch, router.registry, worker, settings.probe)
            try:
                yield router
            finally:
                router.shut_down()
                # Shielded, and bounded: whoever cancels us would else leave KV blocks pinned at the workers.
                with trio.CancelScope(deadline=trio.current_time() + settings.janitor.exit_grace, shield=True):
                    await router.wait_quiet()
                router.janitor.close()
                background.cancel_scope.cancel()


def _assemble(
    workers: list[Worker],
    background: trio.Nursery,
    *,
    settings: RouterSettings,
    observer: Observer,
    new_id: Callable[[], str],
    chance: Callable[[], float],
) -> Router:
    registry = Registry(
        workers,
        policies={role: RoundRobin() for role in WorkerRole},
        observer=observer,
        prefill_optional=settings.handoff.on_empty_prefill is OnEmptyPrefill.DECODE_LOCAL,
    )
    janitor = Janitor(
        background, settings=settings.janitor, observer=observer, new_id=new_id, stand_ins=registry.stand_ins
    )
    handoffs = HandoffBook(settings=settings.handoff, on_end=lambda state: observer.handoff_ended(outcome=state.value))
    attempts = Attempts(
        registry,
        janitor=janitor,
        book=handoffs,
        observer=observer,
        retry=settings.retry,
        new_id=new_id,
        chance=chance,
    )
    return Router(
        settings,
        registry=registry,
        janitor=janitor,
        handoffs=handoffs,
        attempts=attempts,
        observer=observer,
        new_id=new_id,
    )


async def _hold_nursery(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """A nursery that only `open_router` ends: at the latest when the grace is over that it gives at its exit."""
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.shield = True
        task_status.started(nursery)
        await trio.sleep_forever()


def _make_worker(
    spec: WorkerSpec,
    nursery: trio.Nursery,
    *,
    dialer: Dialer,
    settings: RouterSettings,
    observer: Observer,
    chance: Callable[[], float],
) -> Worker:
    def tell(change: StateChange) -> None:
        observer.channel_changed(worker=spec.name, state=change.state.value, reason=change.reason)
        if change.state is not ChannelState.CONNECTING:
            worker.doubt()

    channel = connect_channel(
        nursery, spec.address, dialer=dialer, settings=settings.channel_to(spec), on_state=tell, chance=chance
    )
    worker = Worker(spec, client=WorkerClient(channel), breaker=settings.breaker)
    return worker


async def _watch(registry: Registry, worker: Worker, settings: ProbeSettings) -> None:
    await registry.watch(worker, settings=settings)
