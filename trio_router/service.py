"""A whole router process: the router, its fronts, the metrics listener and the tokenizer, tied together and taken down.

It builds what the settings describe and passes it down; it must not know the command line, nor how anything it builds
works.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from .dispatch.router import Router, open_router
from .errors import BadRequest, ConfigError
from .front.admin import AdminFront
from .front.app import HttpFront
from .front.grpc import grpc_server
from .front.media import AddressesOf, MediaDesk, system_addresses
from .front.references import ReferenceDesk
from .front.seams import Readiness
from .front.settings import FrontSettings, MediaSettings
from .front.texts import BundleText, LoadedText, prepare
from .media.mode import WorkerMedia
from .media.specs import ModelFacts
from .observe.hooks import Observer, Observers
from .observe.log import RequestLog
from .observe.metrics import Metrics, WorkerState, make_registry
from .offload import Offload, Threads
from .rpc.endpoint import dial
from .rpc.server import Server
from .rpc.transport import Dialer, Listener, open_tcp_listener
from .scopes import plain_errors
from .settings import ServiceSettings, TextSettings
from .text.bundle import TokenizerFiles, read_directory
from .text.template import ChatTemplate

OFFLOAD_THREADS: Final = 4
"""For rendering, tokenizing long prompts and loading tokenizers: enough to use a few cores, few enough that a burst of
long prompts cannot take them all."""
NAME_THREADS: Final = 8
"""For the hosts of media, which clients choose: name servers of theirs that do not answer must keep nothing else
waiting, neither prompts nor connections to workers."""
LAST_WORDS: Final = 1.0
"""Seconds that clients get to read why they were cut off."""
# What a model's maker may recommend; anything else in that JSON is not for a router.
_RECOMMENDED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_log: Final = logging.getLogger(__name__)

Listen = Callable[[str, int], Awaitable[Listener]]
"""Opens a listener on a host and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a service listens, as `host:port`."""

    http: str
    grpc: str
    metrics: str


class Service:
    """A running router process, made by `open_service`."""

    def __init__(
        self, *, router: Router, texts: LoadedText | BundleText, http: HttpFront, grpc: Server, addresses: Addresses
    ) -> None:
        self.router = router
        self.addresses = addresses
        self._texts = texts
        self._texts_ready = trio.Event()
        self._http = http
        self._grpc = grpc
        self._grpc_scope = trio.CancelScope()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._drain_asked = trio.Event()
        self._settle = self._grace = 0.0

    def __repr__(self) -> str:
        state = "draining" if self._drain_asked.is_set() else "serving"
        return f"<Service {state} {self.addresses.http} {self.addresses.grpc} {self.router!r}>"

    async def wait_ready(self) -> None:
        """Return when a request could be served: every leg has a worker, and a tokenizer is here."""
        await self.router.wait_ready()
        await self._texts_ready.wait()

    def http_responses(self) -> Mapping[int, int]:
        """How many HTTP responses have been begun, by status."""
        return self._http.server.responses

    async def wait_ended(self) -> None:
        """Return when both fronts have ended, after `drain` or `stop`."""
        await self._ended.wait()

    def drain(self, *, grace: float, settle: float = 0.0) -> None:
        """End in order: say "not ready" and serve on for `settle` seconds, so that balancers can take notice; then take
        nothing new, and let what runs finish for at most `grace` seconds; what is left is told why it is cut off.

        Only the first word counts; `stop` ends everything at once.
        """
        if not self._drain_asked.is_set():
            self._settle, self._grace = settle, grace
            self.router.retire()
            self._drain_asked.set()

    def stop(self) -> None:
        """End everything now."""
        self.router.shut_down()
        self._scope.cancel(reason="stopped")

    async def warm_texts(self) -> None:
        """Try until the tokenizer is here."""
        if isinstance(self._texts, BundleText):
            await self._texts.warm()
        self._texts_ready.set()

    async def run_fronts(self, *, http: Listener, grpc: Listener, task_status: trio.TaskStatus[None]) -> None:
        """Serve both until they have ended."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._end_in_order)
                    async with trio.open_nursery() as fronts:
                        await fronts.start(self._http.serve, http)
                        await fronts.start(self._serve_grpc, grpc)
                        task_status.started()
                    nursery.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def _end_in_order(self) -> None:
        await self._drain_asked.wait()
        if self._settle:
            await trio.sleep(self._settle)
        self._http.drain(grace=self._grace + LAST_WORDS)
        self._grpc_scope.deadline = trio.current_time() + self._grace + LAST_WORDS
        self._grpc.drain()
        await trio.sleep(self._grace)
        self.router.shut_down()

    async def _serve_grpc(self, listener: Listener, *, task_status: trio.TaskStatus[None]) -> None:
        with self._grpc_scope:
            await self._grpc.serve(listener, task_status=task_status)


@asynccontextmanager
async def open_service(
    settings: ServiceSettings,
    *,
    observer: Observer | None = None,
    listen: Listen | None = None,
    dialer: Dialer | None = None,
    offload: Offload | None = None,
) -> AsyncIterator[Service]:
    """Serve as long as the block lasts; leaving it cancels what still runs (`drain` first, to be polite).

    `observer` is told what the metrics and the log are told. `offload` runs what blocks, name resolution for the usual
    `dialer` included (None: threads, different ones for names). Raises ConfigError for settings that cannot work here,
    BadBundle for tokenizer files that cannot be used.
    """
    settings.validate()
    if dialer is None:
        dialer = dial if offload is None else partial(dial, offload=offload)
    names = offload or Threads(NAME_THREADS)
    offload = offload or Threads(OFFLOAD_THREADS)
    metrics = Metrics()
    told = Observers(metrics, RequestLog(), *([observer] if observer else []))
    with ExitStack() as owned, plain_errors():
        opened = await _open_listeners(settings, listen=listen, owned=owned)
        # The operator's own files first: what is wrong with them must not stand among complaints about workers.
        own = await _read_own_files(settings.text, offload=offload)
        async with open_router(settings.router, dialer=dialer, observer=told) as router:
            metrics.workers = lambda: fleet(router)
            texts = own.loaded or BundleText(router, offload=offload, clock=datetime.now, adapt=own.adapt)
            desk = media_desk(
                router,
                settings=settings.front.media,
                observer=told,
                addresses=partial(system_addresses, offload=names),
            )
            service = Service(
                router=router,
                texts=texts,
                http=_http_front(router, texts, settings=settings.front, media=desk, offload=offload, observer=told),
                grpc=grpc_server(
                    router,
                    settings=settings.grpc,
                    media=ReferenceDesk(router, media=desk, texts=texts),
                    observer=told,
                ),
                addresses=Addresses(**{name: listener.address for name, listener in opened.items()}),
            )
            metrics.http_responses = service.http_responses
            metrics.live_handoffs = lambda: len(router.handoffs)
            async with trio.open_nursery() as nursery:
                admin = AdminFront(make_registry(metrics), pages=_debug_pages(router))
                await nursery.start(admin.serve, opened["metrics"])
                start_fronts = _start_fronts(service, opened)
                await nursery.start(start_fronts)
                nursery.start_soon(service.warm_texts)
                try:
                    yield service
                finally:
                    service.stop()
                nursery.cancel_scope.cancel()


def _http_front(
    router: Router,
    texts: LoadedText | BundleText,
    *,
    settings: FrontSettings,
    media: MediaDesk,
    offload: Offload,
    observer: Observer,
) -> HttpFront:
    return HttpFront(
        router,
        texts,
        settings=settings,
        readiness=lambda: _readiness(router),
        sampling_defaults=lambda model: sampling_defaults(router, model),
        context_length=lambda model: context_length(router, model),
        media=media,
        offload=offload,
        observer=observer,
    )


def _debug_pages(router: Router) -> Mapping[str, Callable[[], object]]:
    return {"/debug/handoffs": lambda: router.handoffs.live(now=trio.current_time())}


def _start_fronts(service: Service, opened: Mapping[str, Listener]) -> Callable[..., Awaitable[None]]:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await service.run_fronts(http=opened["http"], grpc=opened["grpc"], task_status=task_status)

    return run


async def _open_listeners(settings: ServiceSettings, *, listen: Listen | None, owned: ExitStack) -> dict[str, Listener]:
    where = settings.listen
    wanted = {
        "http": ("port", where.host, where.port),
        "grpc": ("grpc_port", where.host, where.grpc_port),
        "metrics": ("prometheus_port", where.prometheus_host, where.prometheus_port),
    }
    opened: dict[str, Listener] = {}
    for name, (setting, host, port) in wanted.items():
        opened[name] = await open_listener(setting, host, port, listen=listen)
        owned.callback(opened[name].close)
    return opened


async def open_listener(setting: str, host: str, port: int, *, listen: Listen | None = None) -> Listener:
    """Listen on TCP, or wherever `listen` does. Raises ConfigError, naming the setting, when that is not possible."""
    try:
        return await (listen or _listen_tcp)(host, port)
    except (OSError, UnicodeError) as exc:
        # A host name with an empty or overlong label is a UnicodeError to the resolver.
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{setting}: cannot listen on {host}:{port}: {reason}") from exc


async def _listen_tcp(host: str, port: int) -> Listener:
    return await open_tcp_listener(host, port=port)


@dataclass(frozen=True, slots=True)
class _OwnFiles:
    """What the operator gave in place of the workers' own files."""

    template: bytes | None
    loaded: LoadedText | None

    def adapt(self, files: TokenizerFiles) -> TokenizerFiles:
        if self.template is None:
            return files
        # The name that comes before every other place a model may keep its template in.
        return TokenizerFiles(contents={**files.contents, "chat_template.jinja": self.template})


async def _read_own_files(settings: TextSettings, *, offload: Offload) -> _OwnFiles:
    template = None if settings.chat_template is None else _read_template(settings.chat_template)
    own = _OwnFiles(template, loaded=None)
    directory = settings.tokenizer_path
    if directory is None:
        return own
    files = await offload(lambda: prepare(own.adapt(read_directory(directory)), clock=datetime.now))
    return replace(own, loaded=LoadedText(files))


def _read_template(path: Path) -> bytes:
    """The operator's own template: what is wrong with it is told now, and not to each client."""
    try:
        source = path.read_bytes()
        ChatTemplate(source.decode()).content_format()
    except OSError as exc:
        raise ConfigError(f"chat_template: {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"chat_template: {path} is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    except BadRequest as exc:
        raise ConfigError(f"chat_template: {path}: {exc.message}") from exc
    return source


def fleet(router: Router) -> tuple[WorkerState, ...]:
    """The workers as metrics show them."""
    return tuple(
        WorkerState(
            name=worker.name,
            role=worker.spec.role.value,
            model=worker.facts.model if worker.facts is not None else "unknown",
            ready=worker.ready,
            in_flight=worker.in_flight,
            breaker=worker.breaker.state(trio.current_time()).value,
            tokens_in_flight=worker.tokens_in_flight,
        )
        for worker in router.registry.workers
    )


def _readiness(router: Router) -> Readiness:
    workers = router.registry.workers
    reason = "draining" if router.retired else "insufficient healthy workers"
    return Readiness(
        ready=router.ready,
        reason="" if router.ready else reason,
        healthy_workers=sum(worker.ready for worker in workers),
        total_workers=len(workers),
    )


def context_length(router: Router, model: str) -> int | None:
    """The longest context among the workers that serve the model and tell; None when none does."""
    facts = [worker.facts for worker in router.registry.workers if worker.facts is not None]
    return max((each.model_info.max_context_length for each in facts if each.model == model), default=0) or None


def media_desk(
    router: Router,
    *,
    settings: MediaSettings | None = None,
    observer: Observer | None = None,
    addresses: AddressesOf = system_addresses,
) -> MediaDesk:
    """A desk that admits media to the router's fleet."""
    return MediaDesk(
        partial(model_facts, router),
        partial(media_facts, router),
        settings=settings,
        observer=observer,
        addresses=addresses,
    )


def model_facts(router: Router, model: str) -> ModelFacts:
    """What the first worker that serves the model says of it."""
    facts = (worker.facts for worker in router.registry.workers)
    return next((each.family for each in facts if each is not None and each.model == model), ModelFacts(name=model))


def media_facts(router: Router, model: str) -> tuple[WorkerMedia, ...]:
    """What every worker that serves the model says of media, ready or not."""
    return tuple(
        worker.facts.media(leg=worker.spec.role.value)
        for worker in router.registry.workers
        if worker.facts is not None and worker.facts.model == model
    )


def sampling_defaults(router: Router, model: str) -> Mapping[str, float]:
    """What the model's maker recommends, as the first worker that serves it tells. Nothing when none does."""
    facts = [worker.facts for worker in router.registry.workers if worker.facts is not None]
    known = [each.model_info.default_sampling_params_json for each in facts if each.model == model]
    return _recommended(next(filter(None, known), "{}"))


@lru_cache(maxsize=64)
def _recommended(text: str) -> Mapping[str, float]:
    try:
        given = msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        _log.warning("a worker's default sampling parameters are not a JSON object and are not used")
        return {}
    found = {name: given.get(name) for name in _RECOMMENDED}
    # JSON's true is an int to Python, and no temperature.
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}
