"""Everything `trio-router serve` can be told: the rows people meet, and the frozen records that they become.

The one place that knows which setting goes into which record. Defaults are the records' own wherever they have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from .config import (
    BYTES,
    COUNT,
    FACTOR,
    FRACTION,
    MILLISECONDS,
    PATH,
    PORT,
    SECONDS,
    SECONDS_OR_NONE,
    SWITCH,
    TEXT,
    Row,
    Section,
    Values,
    choice,
)
from .dispatch.retry import RetrySettings
from .dispatch.router import RouterSettings
from .errors import ConfigError
from .fleet.registry import ProbeSettings
from .fleet.worker import WorkerRole, WorkerSpec
from .front.settings import FrontSettings, HttpSettings
from .observe.log import LEVELS, LogSettings
from .rpc.links import ChannelSettings
from .rpc.server import ServerSettings
from .rpc.tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where clients and scrapers come in. Port 0: the system chooses."""

    host: str = "127.0.0.1"
    """No keys are asked for, so loopback unless somebody decides otherwise."""
    port: int = 30000
    grpc_port: int = 30001
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 29000

    def validate(self) -> None:
        """Raise ConfigError when two listeners want one port."""
        wanted = {"port": self.port, "grpc_port": self.grpc_port}
        if self.prometheus_host == self.host:
            wanted["prometheus_port"] = self.prometheus_port
        taken: dict[int, str] = {}
        for name, port in wanted.items():
            if port and port in taken:
                raise ConfigError(f"{name} and {taken[port]} are both {port}; give each its own, or 0")
            taken[port] = name


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Where the tokenizer and the chat template come from. None: from the workers."""

    tokenizer_path: Path | None = None
    chat_template: Path | None = None

    def validate(self) -> None:
        """Raise ConfigError for a path with nothing there."""
        if self.tokenizer_path is not None and not self.tokenizer_path.is_dir():
            raise ConfigError(f"tokenizer_path: {self.tokenizer_path} is not a directory with tokenizer files")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError(f"chat_template: {self.chat_template} is not a file with a Jinja template")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """A whole router process. `shutdown_settle` and `shutdown_grace` are in seconds; see `Service.drain`."""

    router: RouterSettings
    listen: ListenSettings = field(default_factory=ListenSettings)
    front: FrontSettings = field(default_factory=FrontSettings)
    text: TextSettings = field(default_factory=TextSettings)
    log: LogSettings = field(default_factory=LogSettings)
    grpc: ServerSettings = field(default_factory=ServerSettings)
    shutdown_settle: float = 0.0
    shutdown_grace: float = 180.0

    def validate(self) -> None:
        """Raise ConfigError for settings that are right one by one and wrong together, or for this machine."""
        self.router.validate()
        self.listen.validate()
        self.text.validate()
        http = self.front.http
        if http.max_body_bytes > http.max_bodies_bytes:
            raise ConfigError(
                f"max_payload_size ({http.max_body_bytes}) is above http_max_bodies_bytes ({http.max_bodies_bytes}):"
                " a body of that size could never be taken"
            )

    @property
    def descriptors(self) -> int:
        """How many files and sockets the process may have open at one time, if clients are as many as is allowed."""
        return _SPARE_DESCRIPTORS + self._own_sockets + self.front.http.max_connections + self.grpc.max_connections

    @property
    def _own_sockets(self) -> int:
        return _SOCKETS_PER_WORKER * len(self.router.workers)

    def within(self, descriptors: int) -> ServiceSettings:
        """The same for a process that may have only so many open: as many fewer clients, not fewer workers."""
        if descriptors >= self.descriptors:
            return self
        left = max(8, descriptors - _SPARE_DESCRIPTORS - self._own_sockets)
        http = min(self.front.http.max_connections, left - min(self.grpc.max_connections, left // 4))
        grpc = min(self.grpc.max_connections, left - http)
        front = replace(self.front, http=replace(self.front.http, max_connections=http))
        return replace(self, front=front, grpc=replace(self.grpc, max_connections=grpc))


# Listeners, the poller, logs, scrapes of the metrics, imports and files read while the process runs.
_SPARE_DESCRIPTORS: Final = 64
# A link, one that replaces it, and one being dialed.
_SOCKETS_PER_WORKER: Final = 3

_LISTEN: Final = ListenSettings()
_ROUTER: Final = RouterSettings()
_RETRY: Final = RetrySettings()
_PROBE: Final = ProbeSettings()
_HTTP: Final = HttpSettings()
_LOG: Final = LogSettings()

_WORKERS_ROWS: Final = (
    Row(
        name="prefill",
        kind=TEXT,
        many=True,
        words=2,
        default=[],
        metavars=("URL", "BOOTSTRAP_PORT"),
        help="a prefill worker, grpc://host:port (grpcs:// for TLS, or unix:/path); repeat for each. The second word is"
        " for connectors with a bootstrap server; NIXL needs none",
    ),
    Row(
        name="decode",
        kind=TEXT,
        many=True,
        default=[],
        metavars=("URL",),
        help="a decode worker, likewise; repeat for each",
    ),
    Row(
        name="worker_urls",
        kind=TEXT,
        many=True,
        words=0,
        default=[],
        metavars=("URL",),
        help="workers that serve whole requests, instead of --prefill and --decode",
    ),
    Row(
        name="policy",
        kind=choice("round_robin"),
        default="round_robin",
        help="how a worker is chosen among those that are ready",
    ),
    Row(
        name="worker_tls_ca",
        kind=PATH,
        metavars=("FILE",),
        help="PEM file of the authorities that certificates of grpcs:// workers come from (default: the system's)",
    ),
    Row(
        name="worker_tls_cert",
        kind=PATH,
        metavars=("FILE",),
        help="PEM file with the certificate, and its chain, for grpcs:// workers that ask for one",
    ),
    Row(name="worker_tls_key", kind=PATH, metavars=("FILE",), help="PEM file with the key of that certificate"),
    Row(
        name="worker_tls_server_name",
        kind=TEXT,
        metavars=("NAME",),
        help="name that certificates of grpcs:// workers are for (default: each worker's host)",
    ),
)
_HEALTH_ROWS: Final = (
    Row(
        name="health_check_interval_secs",
        kind=SECONDS,
        default=_PROBE.interval,
        help="time between two probes of a worker that is ready",
    ),
    Row(
        name="worker_startup_check_interval",
        kind=SECONDS,
        default=_PROBE.startup_interval,
        help="time in seconds between two probes of a worker that is not ready",
    ),
    Row(
        name="health_failure_threshold",
        kind=COUNT,
        default=_PROBE.failures,
        help="failed probes in a row after which a worker gets no more requests",
    ),
)
_LISTEN_ROWS: Final = (
    Row(
        name="host",
        kind=TEXT,
        default=_LISTEN.host,
        metavars=("HOST",),
        help="address to listen on for HTTP and gRPC; 0.0.0.0 for every IPv4 interface. There is no access control",
    ),
    Row(name="port", kind=PORT, default=_LISTEN.port, help="OpenAI-compatible HTTP"),
    Row(name="grpc_port", kind=PORT, default=_LISTEN.grpc_port, help="gRPC, the same service that workers speak"),
    Row(
        name="prometheus_host",
        kind=TEXT,
        default=_LISTEN.prometheus_host,
        metavars=("HOST",),
        help="address to listen on for metrics",
    ),
    Row(name="prometheus_port", kind=PORT, default=_LISTEN.prometheus_port, help="metrics, at /metrics"),
)
_REQUEST_ROWS: Final = (
    Row(
        name="request_timeout_secs",
        kind=SECONDS,
        default=_ROUTER.request_timeout,
        help="longest a request may take in all; a client's own deadline may be shorter",
    ),
    Row(
        name="max_payload_size",
        kind=BYTES,
        default=_HTTP.max_body_bytes,
        help="largest HTTP request body",
    ),
    Row(
        name="shutdown_settle_secs",
        kind=SECONDS_OR_NONE,
        default=0.0,
        help='after SIGTERM or Ctrl-C, how long to go on serving while saying "not ready", so that a balancer takes'
        " notice before anybody is refused",
    ),
    Row(
        name="shutdown_grace_period_secs",
        kind=SECONDS_OR_NONE,
        default=180.0,
        help="after that, how long running requests may take to finish; a second signal ends them at once",
    ),
)
_RETRY_ROWS: Final = (
    Row(
        name="retry_max_retries",
        kind=COUNT,
        default=_RETRY.attempts,
        help="attempts at most, the first one counted; only until the client has had its first byte",
    ),
    Row(
        name="retry_initial_backoff_ms",
        kind=MILLISECONDS,
        default=_RETRY.initial_backoff * 1000,
        help="pause before the second attempt",
    ),
    Row(
        name="retry_max_backoff_ms",
        kind=MILLISECONDS,
        default=_RETRY.max_backoff * 1000,
        help="longest pause between two attempts",
    ),
    Row(
        name="retry_backoff_multiplier",
        kind=FACTOR,
        default=_RETRY.multiplier,
        help="growth of the pause from one attempt to the next",
    ),
    Row(
        name="retry_jitter_factor",
        kind=FRACTION,
        default=_RETRY.jitter,
        help="random share by which a pause is made longer or shorter",
    ),
    Row(name="disable_retries", kind=SWITCH, default=False, help="one attempt only"),
)
_TEXT_ROWS: Final = (
    Row(
        name="tokenizer_path",
        kind=PATH,
        metavars=("DIRECTORY",),
        help="directory with tokenizer.json and its companions (default: the workers' own, fetched from one of them)",
    ),
    Row(
        name="chat_template",
        kind=PATH,
        metavars=("FILE",),
        help="Jinja file to use instead of the model's own chat template",
    ),
)
_LOG_ROWS: Final = (
    Row(
        name="log_level",
        kind=choice(*LEVELS),
        default=_LOG.level,
        metavars=("LEVEL",),
        help=f"how much to log, on stderr: {', '.join(LEVELS)}",
    ),
    Row(name="log_json", kind=SWITCH, default=_LOG.json, help="one JSON object a line instead of text"),
)
LOG_SECTION: Final = Section(name="log", title="logging", rows=_LOG_ROWS)
# Bounds of the HTTP listener that hardly anybody changes: file and environment only.
_HTTP_ROWS: Final = (
    Row(
        name="http_max_connections",
        kind=COUNT,
        default=_HTTP.max_connections,
        flag=False,
        help="connections held open; fewer where the process may not have so many files open",
    ),
    Row(
        name="http_header_secs",
        kind=SECONDS,
        default=_HTTP.header_seconds,
        flag=False,
        help="time for a request's headers to arrive",
    ),
    Row(
        name="http_keep_alive_secs",
        kind=SECONDS,
        default=_HTTP.keep_alive_seconds,
        flag=False,
        help="time an idle connection is kept",
    ),
    Row(
        name="http_write_stall_secs",
        kind=SECONDS,
        default=_HTTP.write_stall_seconds,
        flag=False,
        help="a client that takes not one byte for this long is taken for gone",
    ),
    Row(
        name="http_max_bodies_bytes",
        kind=BYTES,
        default=_HTTP.max_bodies_bytes,
        flag=False,
        help="request bodies held at one time, over all connections",
    ),
)

SECTIONS: Final = (
    Section(name="workers", title="workers", rows=_WORKERS_ROWS),
    Section(name="listen", title="listening", rows=_LISTEN_ROWS),
    Section(name="requests", title="requests", rows=_REQUEST_ROWS),
    Section(name="text", title="tokenizer and chat template", rows=_TEXT_ROWS),
    Section(name="health", title="worker health", rows=_HEALTH_ROWS),
    Section(name="retry", title="retries", rows=_RETRY_ROWS),
    LOG_SECTION,
    Section(name="http", title="HTTP listener", rows=_HTTP_ROWS),
)


def service_settings(values: Values) -> ServiceSettings:
    """Make the records. Raises ConfigError for a value that fits its kind and is wrong all the same."""
    return ServiceSettings(
        router=RouterSettings(
            workers=_workers(values),
            request_timeout=values["request_timeout_secs"],
            retry=_retry(values),
            channel=ChannelSettings(tls=_worker_tls(values)),
            probe=ProbeSettings(
                interval=values["health_check_interval_secs"],
                startup_interval=values["worker_startup_check_interval"],
                failures=values["health_failure_threshold"],
            ),
        ),
        listen=ListenSettings(
            host=values["host"],
            port=values["port"],
            grpc_port=values["grpc_port"],
            prometheus_host=values["prometheus_host"],
            prometheus_port=values["prometheus_port"],
        ),
        front=FrontSettings(http=_http(values), request_seconds=values["request_timeout_secs"]),
        text=TextSettings(tokenizer_path=_path(values, "tokenizer_path"), chat_template=_path(values, "chat_template")),
        log=log_settings(values),
        shutdown_settle=values["shutdown_settle_secs"],
        shutdown_grace=values["shutdown_grace_period_secs"],
    )


def log_settings(values: Values) -> LogSettings:
    """Make the record of the section that every command has."""
    return LogSettings(level=values["log_level"], json=values["log_json"])


def _retry(values: Values) -> RetrySettings:
    return RetrySettings(
        attempts=1 if values["disable_retries"] else values["retry_max_retries"],
        initial_backoff=values["retry_initial_backoff_ms"] / 1000,
        multiplier=values["retry_backoff_multiplier"],
        max_backoff=values["retry_max_backoff_ms"] / 1000,
        jitter=values["retry_jitter_factor"],
    )


def _http(values: Values) -> HttpSettings:
    return HttpSettings(
        max_connections=values["http_max_connections"],
        header_seconds=values["http_header_secs"],
        keep_alive_seconds=values["http_keep_alive_secs"],
        write_stall_seconds=values["http_write_stall_secs"],
        max_body_bytes=values["max_payload_size"],
        max_bodies_bytes=values["http_max_bodies_bytes"],
    )


def _path(values: Values, name: str) -> Path | None:
    return None if values[name] is None else Path(values[name]).expanduser()


def _workers(values: Values) -> tuple[WorkerSpec, ...]:
    roles = {"prefill": WorkerRole.PREFILL, "decode": WorkerRole.DECODE, "worker_urls": WorkerRole.PLAIN}
    return tuple(
        _worker(text, name=name, role=role, values=values) for name, role in roles.items() for text in values[name]
    )


def _worker(text: str, *, name: str, role: WorkerRole, values: Values) -> WorkerSpec:
    url, *rest = text.split() or [""]
    port = rest[0] if rest else None
    if port == "none":
        # How other gateways spell "no bootstrap server".
        port = None
    if len(rest) > 1 or (port is not None and (role is not WorkerRole.PREFILL or not _is_port(port))):
        wanted = "URL or URL BOOTSTRAP_PORT" if role is WorkerRole.PREFILL else "URL"
        raise values.wrong(name, f"{text!r} is not {wanted}")
    try:
        return WorkerSpec(url=url, role=role, bootstrap_port=None if port is None else int(port))
    except ConfigError as exc:
        raise values.wrong(name, exc.message) from exc


def _worker_tls(values: Values) -> ClientTls | None:
    tls = ClientTls(
        ca_file=_path(values, "worker_tls_ca"),
        cert_file=_path(values, "worker_tls_cert"),
        key_file=_path(values, "worker_tls_key"),
        server_name=values["worker_tls_server_name"],
    )
    return None if tls == ClientTls() else tls


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 65535
