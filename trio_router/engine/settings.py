"""What a reference worker is told before it starts, and the faults it can be told to have while it runs.

Plain records; they know nothing of the code that reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Final

from ..errors import ConfigError
from ..protocol.messages import MediaIdentity
from .vision.settings import MediaSettings


@unique
class Role(StrEnum):
    """What a worker is in the fleet. Prefill and decode workers run the same engine with a KV connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"

    @property
    def kv_role(self) -> str:
        """The connector's word for it; empty where there is no connector."""
        return {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.PLAIN: ""}[self]


@unique
class Connector(StrEnum):
    """How the KV state of a prompt gets from a prefill worker to a decode worker."""

    NIXL = "nixl"
    """The decode worker pulls: the prefill leg returns where the blocks lie, and a lease runs until they are read."""
    MOONCAKE = "mooncake"
    """The prefill worker pushes: whoever asked both legs made up a transfer id, by which they find each other."""
    STORE = "store"
    """A store that both would share. It is not simulated: KV params mean nothing, a decode leg computes its prompt."""
    NONE = "none"
    """No connector at all, though the worker has a role."""

    @property
    def class_name(self) -> str:
        """What `GetServerInfo` calls it: the name of vLLM's class."""
        return _CLASS_NAMES[self]

    @property
    def moves_state(self) -> bool:
        """Whether KV params mean anything to the engine."""
        return self in _LEASES

    @property
    def lease_seconds(self) -> float:
        """How long vLLM's connector of that name holds blocks that nobody fetches."""
        return _LEASES.get(self, _LEASES[Connector.NIXL])


_CLASS_NAMES: Final = {
    Connector.NIXL: "NixlConnector",
    Connector.MOONCAKE: "MooncakeConnector",
    Connector.STORE: "MooncakeStoreConnector",
    Connector.NONE: "",
}
_LEASES: Final = {Connector.NIXL: 30.0, Connector.MOONCAKE: 480.0}

MODEL_NAME: Final = "tiny-english"
VISION_MODEL_NAME: Final = "tiny-vl-english"

_COUNTS: Final = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_context_length",
    "max_batched_tokens",
    "tp_size",
    "dp_size",
)
_POSITIVE: Final = ("prefill_tokens_per_second", "lease_seconds", "handshake_seconds")
_SPELLINGS: Final[dict[str, type[StrEnum]]] = {"role": Role, "connector": Connector}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker. Durations in seconds, sizes in tokens or blocks as named.

    The defaults are a small, quick machine: 65,536 tokens of cache, a token every 5 ms for each sequence.
    """

    name: str
    role: str = Role.PLAIN
    """A `Role` or its value."""
    connector: str = Connector.NIXL
    """A `Connector` or its value; means nothing on a plain worker."""
    model_name: str | None = None
    """What it claims to serve; None: the name of the packaged model, or of its variant that sees."""
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 256
    max_context_length: int = 8192
    max_batched_tokens: int = 2048
    """Prompt tokens that one step may compute: a longer prompt is prefilled in chunks, between decode steps."""
    prefill_tokens_per_second: float = 50_000.0
    inter_token_seconds: float = 0.005
    """Length of a decode step; 0 decodes as fast as the machine can."""
    lease_seconds: float | None = None
    """How long a prefill worker holds a handoff that nobody fetches; None: as long as the real connector (30 s for
    NIXL, 480 s for Mooncake). A waiting NIXL decode worker renews it."""
    handshake_seconds: float = 5.0
    """How long a decode worker tries to reach a side channel, or waits there for a pushed transfer, before it gives the
    load up."""
    transfer_address: str = "127.0.0.1:0"
    """Where to listen for other workers' pulls. Only read by whoever opens the listener."""
    tp_size: int = 1
    engine_id: str | None = None
    """What handoffs call its engine; None: made of name and seed, the same at every start. A real one is new each time,
    so that what an earlier run handed over is refused."""
    dp_size: int = 1
    """Data parallel ranks it claims. One engine stands for them all, but every request and handoff has a rank."""
    seed: int = 0
    media: MediaSettings = field(default_factory=MediaSettings)

    def __post_init__(self) -> None:
        for knob, words in _SPELLINGS.items():
            given = getattr(self, knob)
            try:
                object.__setattr__(self, knob, words(given))
            except ValueError:
                known = ", ".join(word.value for word in words)
                raise ConfigError(f"worker {self.name!r}: {knob} {given!r} is none of {known}") from None
        for knob in _COUNTS:
            if getattr(self, knob) < 1:
                raise ConfigError(f"worker {self.name!r}: {knob} must be at least 1, not {getattr(self, knob)}")
        for knob in _POSITIVE:
            value = getattr(self, knob)
            if value is not None and not value > 0:
                raise ConfigError(f"worker {self.name!r}: {knob} must be above 0, not {value}")
        if self.inter_token_seconds < 0:
            raise ConfigError(f"worker {self.name!r}: inter_token_seconds must not be negative")
        if self.num_blocks * self.block_size < self.max_context_length:
            # One sequence must always fit, or a preempted one could wait for ever.
            raise ConfigError(
                f"worker {self.name!r}: {self.num_blocks} blocks of {self.block_size} tokens cannot hold one context"
                f" of {self.max_context_length}; raise num_blocks or lower max_context_length"
            )

    @property
    def served_name(self) -> str:
        """The model name in force."""
        return self.model_name or (VISION_MODEL_NAME if self.media.sees else MODEL_NAME)

    @property
    def kv_connector(self) -> Connector:
        """The connector it runs with: none on a plain worker, whatever it was given."""
        return Connector.NONE if self.role == Role.PLAIN else Connector(self.connector)

    @property
    def kv_role(self) -> str:
        """The word `GetServerInfo` uses for the role; empty without a connector."""
        return "" if self.kv_connector is Connector.NONE else Role(self.role).kv_role

    @property
    def moves_state(self) -> bool:
        """Whether KV params mean anything to this worker."""
        return self.kv_connector.moves_state

    @property
    def lease(self) -> float:
        """The lease in force, in seconds."""
        return Connector(self.connector).lease_seconds if self.lease_seconds is None else self.lease_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with a worker just now. Replaced as a whole while it runs; the default is nothing.

    Rates are probabilities per request, drawn from the worker's own seeded source.
    """

    error_rate: float = 0.0
    """Ends with an OK stream and finish reason "error", before the first token."""
    load_error_rate: float = 0.0
    """The same, but only for requests that have a handoff to pull."""
    raise_rate: float = 0.0
    """Fails with INTERNAL and no details, as an engine exception does."""
    refuse_admission: bool = False
    """Refuses every Generate with UNAVAILABLE, as a full request queue does."""
    drop_handoff: bool = False
    """Prefill legs finish without KV params and pin nothing."""
    hang: bool = False
    """Steps stop; the service goes on answering."""
    hold_prefill: bool = False
    """Prefill legs are computed but do not produce their token until this is lifted."""
    hold_pull: bool = False
    """Decode legs that have been admitted do not begin to pull until this is lifted."""
    first_frame_delay_seconds: float = 0.0
    """Time between a request's KV being ready and its first token."""
    change_identity: Callable[[MediaIdentity], MediaIdentity | None] | None = None
    """What is returned in place of the identity that a prefill leg has made of its media; None: nothing."""
