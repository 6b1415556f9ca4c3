"""`trio-router worker`: one reference worker as a process, its options, its sockets, and an end that lets it finish."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

import trio

from ..config import (
    COUNT,
    MILLISECONDS,
    PATH,
    PORT,
    RATE,
    SECONDS,
    SECONDS_OR_NONE,
    TEXT,
    WHOLE,
    Row,
    Section,
    Values,
    choice,
)
from ..engine.settings import MODEL_NAME, VISION_MODEL_NAME, Connector, Role, WorkerSettings
from ..engine.worker import Worker, open_worker
from ..errors import ConfigError
from ..rows import LOG_SECTION
from ..rpc.tls import ServerTls
from ..service import open_listener
from .worker_media import MEDIA_SECTION, media_settings

_POLL: Final = 0.05
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcessSettings:
    """A worker and where it listens. Port 0: the system chooses. `shutdown_grace` is in seconds.

    With a certificate it serves TLS; with `tls_client_ca` only to clients that show one.
    """

    worker: WorkerSettings
    host: str = "127.0.0.1"
    port: int = 50051
    transfer_port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    shutdown_grace: float = 30.0


_DEFAULT: Final = WorkerSettings(name="worker")

WORKER_SECTIONS: Final = (
    Section(
        name="worker",
        title="what it is",
        rows=(
            Row(
                name="role",
                kind=choice(*(role.value for role in Role)),
                default=Role.PLAIN.value,
                help="which leg it serves; a plain worker serves whole requests",
            ),
            Row(
                name="connector",
                kind=choice(*(connector.value for connector in Connector)),
                default=Connector.NIXL.value,
                help="how decode workers get the state of a prompt: they pull it (nixl), prefill workers push it"
                " (mooncake), or they compute it themselves (store, none; a shared store is claimed, not simulated)",
            ),
            Row(name="name", kind=TEXT, metavars=("NAME",), help="its name in logs and ids (default: role and port)"),
            Row(
                name="model_name",
                kind=TEXT,
                metavars=("NAME",),
                help=f"model name it claims to serve (default: {MODEL_NAME}; {VISION_MODEL_NAME} if it takes media)",
            ),
            Row(name="seed", kind=WHOLE, default=_DEFAULT.seed, help="of its random choices"),
        ),
    ),
    Section(
        name="listen",
        title="listening",
        rows=(
            Row(
                name="host",
                kind=TEXT,
                default="127.0.0.1",
                metavars=("HOST",),
                help="address to listen on, and the one that other workers pull from: give one they can reach",
            ),
            Row(name="port", kind=PORT, default=50051, help="gRPC"),
            Row(name="transfer_port", kind=PORT, default=0, help="transfers of KV state between workers"),
            Row(
                name="tls_cert",
                kind=PATH,
                metavars=("FILE",),
                help="PEM file with a certificate and its chain: gRPC over TLS, grpcs:// for routers",
            ),
            Row(name="tls_key", kind=PATH, metavars=("FILE",), help="PEM file with the key of that certificate"),
            Row(
                name="tls_client_ca",
                kind=PATH,
                metavars=("FILE",),
                help="PEM file of authorities: routers must show a certificate from one of them",
            ),
            Row(
                name="shutdown_grace_period_secs",
                kind=SECONDS_OR_NONE,
                default=30.0,
                help="after SIGTERM or Ctrl-C, how long calls and handoffs may take to finish",
            ),
        ),
    ),
    Section(
        name="engine",
        title="the simulated engine",
        rows=(
            Row(name="block_size", kind=COUNT, default=_DEFAULT.block_size, help="tokens in a block of KV cache"),
            Row(name="num_blocks", kind=COUNT, default=_DEFAULT.num_blocks, help="blocks of KV cache"),
            Row(name="max_num_seqs", kind=COUNT, default=_DEFAULT.max_num_seqs, help="sequences that run at one time"),
            Row(
                name="max_context_length",
                kind=COUNT,
                default=_DEFAULT.max_context_length,
                help="tokens of prompt and answer together",
            ),
            Row(
                name="max_batched_tokens",
                kind=COUNT,
                default=_DEFAULT.max_batched_tokens,
                help="prompt tokens of one engine step",
            ),
            Row(
                name="prefill_tokens_per_second",
                kind=RATE,
                default=_DEFAULT.prefill_tokens_per_second,
                help="speed of prompts",
            ),
            Row(
                name="inter_token_ms",
                kind=MILLISECONDS,
                default=_DEFAULT.inter_token_seconds * 1000,
                help="time from one token to the next; 0 is as fast as the machine can",
            ),
            Row(
                name="lease_secs",
                kind=SECONDS,
                help="how long a handoff that nobody fetches is held (default: 30, with mooncake 480)",
            ),
            Row(
                name="handshake_secs",
                kind=SECONDS,
                default=_DEFAULT.handshake_seconds,
                help="how long a decode worker tries to reach a prefill worker, or waits for it to push",
            ),
            Row(name="tp_size", kind=COUNT, default=_DEFAULT.tp_size, help="tensor parallel size it claims"),
            Row(
                name="dp_size",
                kind=COUNT,
                default=_DEFAULT.dp_size,
                help="data parallel ranks it claims; each request, and its handoff, is of one",
            ),
        ),
    ),
    MEDIA_SECTION,
    LOG_SECTION,
)


def worker_settings(values: Values) -> WorkerProcessSettings:
    """Make the records. Raises ConfigError for knobs that cannot go together."""
    worker = WorkerSettings(
        name=values["name"] or f"{values['role']}-{values['port']}",
        role=values["role"],
        connector=values["connector"],
        model_name=values["model_name"],
        seed=values["seed"],
        block_size=values["block_size"],
        num_blocks=values["num_blocks"],
        max_num_seqs=values["max_num_seqs"],
        max_context_length=values["max_context_length"],
        max_batched_tokens=values["max_batched_tokens"],
        prefill_tokens_per_second=values["prefill_tokens_per_second"],
        inter_token_seconds=values["inter_token_ms"] / 1000,
        lease_seconds=values["lease_secs"],
        handshake_seconds=values["handshake_secs"],
        tp_size=values["tp_size"],
        dp_size=values["dp_size"],
        media=media_settings(values),
    )
    return WorkerProcessSettings(
        worker=worker,
        host=values["host"],
        port=values["port"],
        transfer_port=values["transfer_port"],
        tls_cert=_path(values["tls_cert"]),
        tls_key=_path(values["tls_key"]),
        tls_client_ca=_path(values["tls_client_ca"]),
        shutdown_grace=values["shutdown_grace_period_secs"],
    )


async def run_worker(settings: WorkerProcessSettings, *, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let calls finish; a second signal ends everything at once.

    `say` gets one line, beginning with "ready", when calls are answered.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        tls = _tls(settings)
        listener = await open_listener("port", settings.host, settings.port)
        try:
            transfers = await open_listener("transfer_port", settings.host, settings.transfer_port)
        except ConfigError:
            listener.close()
            raise
        served = listener if tls is None else tls.listen(listener)
        # Another one at every start: a handoff of the process before must not be read from the memory of this one.
        named = replace(settings.worker, engine_id=f"{settings.worker.name}-{uuid4()}")
        async with open_worker(named, listener=served, transfer_listener=transfers) as worker:
            url = f"{'grpc' if tls is None else 'grpcs'}://{worker.address}"
            say(f"ready: {settings.worker.role} worker on {url} (transfers on {worker.transfer_address})")
            name = await anext(signals)
            _log.info("%s: calls may take %g s to finish", signal.Signals(name).name, settings.shutdown_grace)
            with trio.move_on_after(settings.shutdown_grace):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_hurry, signals, nursery)
                    await _quiet(worker)
                    nursery.cancel_scope.cancel()


def _tls(settings: WorkerProcessSettings) -> ServerTls | None:
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is not None and key is not None:
        return ServerTls(cert_file=cert, key_file=key, client_ca_file=client_ca)
    if cert is not None or key is not None or client_ca is not None:
        raise ConfigError("TLS takes both tls_cert and tls_key, whether with tls_client_ca or without")
    return None


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


async def _quiet(worker: Worker) -> None:
    """Wait until nothing runs and nobody has a handoff to fetch; pulls come by another way than calls."""
    await worker.drain()
    # The ledger is the engine's and has no event; this runs once, in the last seconds of a process.
    while worker.ledger:  # noqa: ASYNC110
        await trio.sleep(_POLL)


async def _hurry(signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
    number = await anext(signals)
    _log.warning("%s again: ending everything now", signal.Signals(number).name)
    nursery.cancel_scope.cancel()
