"""What a router process is told, as frozen records, and how they are made from the rows that people meet.

The one place that knows which setting goes into which record.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from .config import Values
from .dispatch.handoff import HandoffSettings, OnEmptyPrefill, OnMissingHandoff
from .dispatch.retry import RetrySettings
from .dispatch.router import RouterSettings
from .errors import ConfigError
from .fleet.registry import ProbeSettings
from .fleet.worker import WorkerRole, WorkerSpec
from .front.settings import FrontSettings, HttpSettings, MediaSettings
from .media.gate import MediaPolicy
from .media.hosts import is_domain
from .media.mode import ProcessingMode
from .observe.log import LogSettings
from .policy.breaker import BreakerSettings
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
# Failures in a row that no worker has had before it was restarted.
_NEVER: Final = 2**62


def service_settings(values: Values) -> ServiceSettings:
    """Make the records. Raises ConfigError for a value that fits its kind and is wrong all the same."""
    return ServiceSettings(
        router=RouterSettings(
            workers=_workers(values),
            request_timeout=values["request_timeout_secs"],
            handoff=_handoff(values),
            retry=_retry(values),
            breaker=_breaker(values),
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
        front=FrontSettings(http=_http(values), media=_media(values), request_seconds=values["request_timeout_secs"]),
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
        budget_share=values["retry_budget_share"],
        budget_floor=values["retry_budget_floor"],
        busy_retry_after=values["busy_retry_after_secs"],
    )


def _handoff(values: Values) -> HandoffSettings:
    return HandoffSettings(
        fresh_fraction=values["handoff_fresh_fraction"],
        nixl_lease=values["nixl_lease_secs"],
        mooncake_lease=values["mooncake_lease_secs"],
        on_missing=OnMissingHandoff(values["on_missing_handoff"]),
        on_empty_prefill=OnEmptyPrefill(values["on_empty_prefill"]),
    )


def _breaker(values: Values) -> BreakerSettings:
    return BreakerSettings(
        failures=_NEVER if values["disable_circuit_breaker"] else values["cb_failure_threshold"],
        window=values["cb_window_duration_secs"],
        first_pause=values["cb_first_timeout_secs"],
        pause=values["cb_timeout_duration_secs"],
        successes=values["cb_success_threshold"],
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


def _media(values: Values) -> MediaSettings:
    # One flag may name several, as those of other gateways do.
    domains = [domain.strip() for text in values["mm_allowed_media_domains"] for domain in text.split(",")]
    for domain in domains:
        if not is_domain(domain):
            raise values.wrong("mm_allowed_media_domains", f"{domain!r} is not a host, or .domain for all below it")
    return MediaSettings(
        mode=ProcessingMode(values["mm_processing"]),
        policy=MediaPolicy(
            allow_private_hosts=values["mm_allow_private_media_hosts"],
            allowed_domains=tuple(domains),
            image_limit=values["mm_per_request_image_limit"],
            max_image_bytes=values["mm_image_max_bytes"],
            max_video_bytes=values["mm_video_max_bytes"],
        ),
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
