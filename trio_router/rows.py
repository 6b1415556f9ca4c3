"""Every setting of `trio-router serve` as people meet it: name, kind, default, help. Defaults are the records' own.

It must not know how a setting is found, nor what is made of it.
"""

from __future__ import annotations

from typing import Final

from .config import (
    AMOUNT,
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
    choice,
)
from .dispatch.handoff import HandoffSettings, OnEmptyPrefill, OnMissingHandoff
from .dispatch.retry import RetrySettings
from .dispatch.router import RouterSettings
from .fleet.registry import ProbeSettings
from .front.settings import HttpSettings, MediaSettings
from .media.mode import ProcessingMode
from .observe.log import LEVELS, LogSettings
from .policy.breaker import BreakerSettings
from .settings import ListenSettings

_LISTEN: Final = ListenSettings()
_ROUTER: Final = RouterSettings()
_HANDOFF: Final = HandoffSettings()
_RETRY: Final = RetrySettings()
_BREAKER: Final = BreakerSettings()
_PROBE: Final = ProbeSettings()
_HTTP: Final = HttpSettings()
_MEDIA: Final = MediaSettings()
_LOG: Final = LogSettings()

_WORKERS_ROWS: Final = (
    Row(
        name="prefill",
        kind=TEXT,
        many=True,
        words=2,
        default=[],
        metavars=("URL", "BOOTSTRAP_PORT"),
        help="a prefill worker, grpc://host:port (grpcs:// for TLS, or unix:/path); repeat for each. An @N behind the"
        " port pins requests to data-parallel rank N. The second word is for connectors with a bootstrap server"
        " (Mooncake, where it is 8998 if not given); NIXL needs none",
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
    Row(
        name="prometheus_port",
        kind=PORT,
        default=_LISTEN.prometheus_port,
        help="metrics, at /metrics; the handoffs that have not ended, at /debug/handoffs",
    ),
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
    Row(
        name="retry_budget_share",
        kind=FRACTION,
        default=_RETRY.budget_share,
        help="retries that all requests together may make, for each request that comes",
    ),
    Row(
        name="retry_budget_floor",
        kind=AMOUNT,
        default=_RETRY.budget_floor,
        help="retries a second that there may be besides, however little traffic there is",
    ),
    Row(
        name="disable_retries",
        kind=SWITCH,
        default=False,
        help="one attempt only; a worker that is busy is still left for another",
    ),
    Row(
        name="busy_retry_after_secs",
        kind=SECONDS,
        default=_RETRY.busy_retry_after,
        flag=False,
        help="when a client that found every worker of a leg busy is asked to come back",
    ),
)
_HANDOFF_ROWS: Final = (
    Row(
        name="on_missing_handoff",
        kind=choice(*(action.value for action in OnMissingHandoff)),
        default=_HANDOFF.on_missing.value,
        help="when a prefill worker hands nothing over: recompute has the decode worker compute the prompt again, with"
        " a warning; fail makes that an error (502)",
    ),
    Row(
        name="on_empty_prefill",
        kind=choice(*(action.value for action in OnEmptyPrefill)),
        default=_HANDOFF.on_empty_prefill.value,
        help="when no prefill worker can be had: fail is an error (503); decode-local has a decode worker serve the"
        " request whole",
    ),
    Row(
        name="nixl_lease_secs",
        kind=SECONDS,
        default=_HANDOFF.nixl_lease,
        help="how long NIXL prefill workers hold what nobody has fetched: their kv_lease_duration",
    ),
    Row(
        name="mooncake_lease_secs",
        kind=SECONDS,
        default=_HANDOFF.mooncake_lease,
        help="the same for Mooncake",
    ),
    Row(
        name="handoff_fresh_fraction",
        kind=FRACTION,
        default=_HANDOFF.fresh_fraction,
        flag=False,
        help="share of its lease up to which a handoff is offered to a decode worker",
    ),
)
_BREAKER_ROWS: Final = (
    Row(
        name="cb_failure_threshold",
        kind=COUNT,
        default=_BREAKER.failures,
        help="failures in a row after which a worker gets no requests for a while",
    ),
    Row(
        name="cb_success_threshold",
        kind=COUNT,
        default=_BREAKER.successes,
        help="requests that must go well after that while before the worker is trusted again",
    ),
    Row(
        name="cb_first_timeout_secs",
        kind=SECONDS,
        default=_BREAKER.first_pause,
        help="length of that while at first; it doubles each time the worker fails again",
    ),
    Row(name="cb_timeout_duration_secs", kind=SECONDS, default=_BREAKER.pause, help="the longest it gets"),
    Row(
        name="cb_window_duration_secs",
        kind=SECONDS,
        default=_BREAKER.window,
        help="failures further apart than this are not counted together",
    ),
    Row(name="disable_circuit_breaker", kind=SWITCH, default=False, help="never stop sending requests for failures"),
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
_MEDIA_ROWS: Final = (
    Row(
        name="mm_processing",
        kind=choice(*(mode.value for mode in ProcessingMode)),
        default=_MEDIA.mode.value,
        alias="SMG_MM_PROCESSING",
        help="who fetches and processes images and videos: auto leaves to the workers what every one of them can do;"
        " worker leaves them everything, and refuses what they cannot; router is the router itself, which cannot yet"
        " (501)",
    ),
    Row(
        name="mm_allow_private_media_hosts",
        kind=SWITCH,
        default=_MEDIA.policy.allow_private_hosts,
        alias="SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS",
        help="let clients have media fetched from hosts that are not public: this machine, private networks, metadata",
    ),
    Row(
        name="mm_allowed_media_domains",
        kind=TEXT,
        many=True,
        default=[],
        metavars=("DOMAINS",),
        help="hosts that media may come from, and no others; repeat, or separate by commas. A dot in front allows all"
        " below. These may be private ones",
    ),
    Row(
        name="mm_per_request_image_limit",
        kind=COUNT,
        help="images that a request may have, besides what the model and its workers allow",
    ),
    Row(
        name="mm_image_max_bytes",
        kind=BYTES,
        default=_MEDIA.policy.max_image_bytes,
        flag=False,
        alias="SMG_IMAGE_MAX_INPUT_BYTES",
        forgiving=True,
        help="largest image in a data: URL, decoded",
    ),
    Row(
        name="mm_video_max_bytes",
        kind=BYTES,
        default=_MEDIA.policy.max_video_bytes,
        flag=False,
        alias="SMG_VIDEO_MAX_INPUT_BYTES",
        forgiving=True,
        help="the same for a video",
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
    Section(name="media", title="images and videos", rows=_MEDIA_ROWS),
    Section(name="health", title="worker health", rows=_HEALTH_ROWS),
    Section(name="handoff", title="handoffs between prefill and decode", rows=_HANDOFF_ROWS),
    Section(name="retry", title="retries", rows=_RETRY_ROWS),
    Section(name="breaker", title="circuit breakers", rows=_BREAKER_ROWS),
    LOG_SECTION,
    Section(name="http", title="HTTP listener", rows=_HTTP_ROWS),
)
