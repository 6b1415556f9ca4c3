"""The HTTP front: routes, request ids and health around the OpenAI endpoints, served on a listener.

Must not know what an endpoint does, nor how a connection is kept.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import unquote

import msgspec
import trio

from ..observe.hooks import Observer
from ..offload import Offload, inline
from ..rpc.transport import Listener
from .exchange import Exchange, is_request_id
from .faults import ClientGone, MethodNotAllowed, NoSuchRoute, UnsupportedMedia
from .http import HttpServer
from .media import MediaDesk
from .openai.chat import chat_completions
from .openai.completions import completions
from .openai.endpoint import Services, any_length, no_defaults
from .openai.models import list_models, show_model
from .respond import http_reply
from .seams import ContextLength, Readiness, Router, SamplingDefaults, TextSource
from .settings import FrontSettings
from .wire import Headers

Route = Callable[[Exchange], Awaitable[None]]
TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
JSON: Final = (b"content-type", b"application/json")

_MODEL_PATH: Final = "/v1/models/"
# How records and logs name what serves a path; everything else is "http".
_CLIENTS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_ANY_CLIENT: Final = "http"


def random_id() -> str:
    """32 hexadecimal digits."""
    return secrets.token_hex(16)


class HttpFront:
    """The OpenAI API and health over HTTP/1.1.

    `readiness` tells what `/readiness` says besides "draining" and a missing tokenizer; without it `router.ready` does.
    `ids` and `clock` (wall time, seconds) are the only sources of randomness and time in what clients see.
    """

    def __init__(
        self,
        router: Router,
        texts: TextSource,
        *,
        settings: FrontSettings | None = None,
        readiness: Callable[[], Readiness] | None = None,
        sampling_defaults: SamplingDefaults = no_defaults,
        context_length: ContextLength = any_length,
        media: MediaDesk | None = None,
        offload: Offload = inline,
        observer: Observer | None = None,
        ids: Callable[[], str] = random_id,
        clock: Callable[[], float] = time.time,
    ) -> None:
        settings = settings or FrontSettings()
        self._router = router
        self._texts = texts
        self._ids = ids
        self._observer = observer or Observer()
        self._readiness = readiness or self._router_readiness
        self._services = services = Services(
            router=router,
            texts=texts,
            settings=settings,
            ids=ids,
            clock=clock,
            offload=offload,
            sampling_defaults=sampling_defaults,
            context_length=context_length,
            media=media or MediaDesk(settings=settings.media, observer=observer),
        )
        self._server = HttpServer(self.handle, settings=settings.http, clock=clock, on_refusal=self._refused)
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": lambda exchange: chat_completions(exchange, services)},
            "/v1/completions": {"POST": lambda exchange: completions(exchange, services)},
            "/v1/models": {"GET": lambda exchange: list_models(exchange, services)},
            "/health": {"GET": alive},
            "/liveness": {"GET": alive},
            "/readiness": {"GET": self._ready},
        }

    def __repr__(self) -> str:
        return f"<HttpFront {self._server!r}>"

    @property
    def server(self) -> HttpServer:
        """The server underneath: its connections and held bytes."""
        return self._server

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained or cancelled; owns the listener."""
        await self._server.serve(listener, task_status=task_status)

    def drain(self, *, grace: float) -> None:
        """Shut down as `HttpServer.drain`; readiness turns to 503 for those still connected."""
        self._server.drain(grace=grace)

    async def handle(self, exchange: Exchange) -> None:
        """Answer one exchange. Raises the error family; whoever called turns it into the response."""
        given = (exchange.request.header(b"x-request-id") or b"").decode("latin-1")
        exchange.given_id = given if is_request_id(given) else None
        exchange.name(exchange.given_id or self._new_id())
        try:
            await self._answer(exchange)
        except BaseException as exc:
            if not exchange.recorded:
                self._tell_refusal(exchange, exc)
            raise

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        coding = request.header(b"content-encoding")
        if coding is not None and coding.lower() != b"identity":
            raise UnsupportedMedia("request bodies are read as they are; send no content-encoding")
        await self._route(request.method, request.path)(exchange)

    def _tell_refusal(self, exchange: Exchange, error: BaseException) -> None:
        # What is no Exception is a cancel: the client has left.
        code = http_reply(error).code if isinstance(error, Exception) else ClientGone.code
        client = _CLIENTS.get(exchange.request.path, _ANY_CLIENT)
        self._observer.request_refused(request_id=exchange.request_id, client=client, code=code)

    def _refused(self, code: str) -> Headers:
        """A request that could not be read has an id all the same, so that it can be found in the log."""
        request_id = self._new_id()
        self._observer.request_refused(request_id=request_id, client=_ANY_CLIENT, code=code)
        return ((b"x-request-id", request_id.encode("ascii")),)

    def _route(self, method: str, path: str) -> Route:
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODEL_PATH):
            name = unquote(path.removeprefix(_MODEL_PATH))
            methods = {"GET": lambda exchange: show_model(exchange, self._services, name=name)}
        return pick(methods, method=method, path=path)

    def _new_id(self) -> str:
        return f"req-{self._ids()}"

    def _router_readiness(self) -> Readiness:
        return Readiness(ready=self._router.ready, reason="" if self._router.ready else "insufficient healthy workers")

    async def _ready(self, exchange: Exchange) -> None:
        state = self._readiness()
        if self._server.draining:
            state = Readiness(ready=False, reason="draining")
        elif state.ready and not self._texts.ready:
            state = Readiness(ready=False, reason="tokenizer not yet registered")
        answer: dict[str, object] = {"status": "ready" if state.ready else "not ready"}
        if not state.ready:
            answer["reason"] = state.reason
        if state.healthy_workers is not None and state.total_workers is not None:
            answer |= {"healthy_workers": state.healthy_workers, "total_workers": state.total_workers}
        await exchange.respond(200 if state.ready else 503, headers=(JSON,), body=msgspec.json.encode(answer))


async def alive(exchange: Exchange) -> None:
    """Say OK: the process lives."""
    await exchange.respond(200, headers=(TEXT,), body=b"OK")


def pick(methods: dict[str, Route] | None, *, method: str, path: str) -> Route:
    """The route of a method, HEAD being served by GET's; raises NoSuchRoute, MethodNotAllowed."""
    if methods is None:
        raise NoSuchRoute(f"nothing is served at {path}")
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        allowed = sorted({*methods, "HEAD"} if "GET" in methods else methods)
        raise MethodNotAllowed(f"{path} does not take {method}", allowed=allowed)
    return route
