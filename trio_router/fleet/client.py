"""The typed client of one worker, over betterproto's generated stubs; Generate goes as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ..errors import WorkerUnavailable
from ..media.gate import parse_schemes
from ..media.mode import WorkerMedia
from ..media.specs import ModelFacts
from ..pieces import Message
from ..protocol.codec import decode, encode
from ..protocol.messages import (
    AbortRequest,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    GetTokenizerChunk,
    GetTokenizerRequest,
    HealthCheckRequest,
    VllmEngineStub,
)
from ..rpc.call import ClientCall
from ..rpc.channel import Channel

GENERATE: Final = "/vllm.grpc.engine.VllmEngine/Generate"
GET_TOKENIZER: Final = "/vllm.grpc.engine.VllmEngine/GetTokenizer"
ABORT_TIMEOUT: Final = 10.0
"""Seconds for an Abort, the wait for its turn included: the bound the field's gateways use."""
ABORTS_AT_ONCE: Final = 4
"""Abort calls under way at a worker. One that answers needs no more, and one that does not must not be buried under
them. Half of the streams that are kept for control calls stay free for releases.
"""
INFO_TIMEOUT: Final = 5.0
TOKENIZER_TIMEOUT: Final = 120.0
TOKENIZER_MAX_BYTES: Final = 200 * 1024 * 1024
"""A bundle is collected in memory before its hash can be checked, so it needs a bound before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker said of itself (GetModelInfo and GetServerInfo). Empty strings and zeros mean unknown."""

    model: str
    model_info: GetModelInfoResponse
    server_info: GetServerInfoResponse = field(default_factory=GetServerInfoResponse)
    kv_connector: str = ""
    kv_role: str = ""
    kv_engine_id: str = ""
    data_parallel_size: int = 0
    max_num_seqs: int = 0
    block_size: int = 0

    @property
    def family(self) -> ModelFacts:
        """What tells which family its model is of."""
        info = self.model_info
        return ModelFacts(name=self.model, model_type=info.model_type, architectures=tuple(info.architectures))

    def media(self, *, leg: str = "") -> WorkerMedia:
        """What it says of media, as a worker for this leg. Every worker here speaks vLLM's gRPC service; there are none
        behind ZMQ.
        """
        server = self.server_info
        return WorkerMedia(
            mm_processor=server.mm_processor,
            schemes=parse_schemes(server.mm_media_ref_schemes),
            item_limits=server.mm_item_limits,
            leg=leg,
        )


class WorkerClient:
    """RPCs of one worker. Every call but Generate has a deadline of its own; Generate's is its caller's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stub = VllmEngineStub(channel)  # type: ignore[arg-type]  # ours stands in for grpclib's Channel class
        self._control = VllmEngineStub(channel.control)  # type: ignore[arg-type]  # as above
        self._aborting = trio.Semaphore(ABORTS_AT_ONCE)

    async def connect(self) -> None:
        """Return when a call could be opened without waiting; raises LinkError when the worker cannot be reached."""
        await self._channel.connect()

    async def generate(self, request: Message, *, control: bool = False) -> ClientCall:
        """Open a Generate call; raises LinkError when the worker cannot be reached. `control`: for one that frees
        something, which must not wait for room that others take.
        """
        return await self._channel.call(GENERATE, request, control=control)

    async def abort(self, request_ids: list[str]) -> None:
        """Ask the worker to end requests by the ids it was given; unknown ids are ignored there. Raises GRPCError."""
        deadline = trio.current_time() + ABORT_TIMEOUT
        with trio.move_on_at(deadline):
            async with self._aborting:
                left = deadline - trio.current_time()
                await self._control.abort(AbortRequest(request_ids=request_ids), timeout=left)
                return
        raise GRPCError(Status.DEADLINE_EXCEEDED, "the worker did not answer the aborts before this one in time")

    async def healthy(self) -> bool:
        """The worker's own word on its engine. Raises GRPCError when it cannot be asked."""
        return (await self._stub.health_check(HealthCheckRequest(), timeout=INFO_TIMEOUT)).healthy

    async def facts(self) -> WorkerFacts:
        """Ask for both info messages. Raises GRPCError."""
        model = await self._stub.get_model_info(GetModelInfoRequest(), timeout=INFO_TIMEOUT)
        server = await self._stub.get_server_info(GetServerInfoRequest(), timeout=INFO_TIMEOUT)
        return WorkerFacts(
            model=model.served_model_name or model.model_path or "unknown",
            model_info=model,
            server_info=server,
            kv_connector=server.kv_connector,
            kv_role=server.kv_role,
            kv_engine_id=server.kv_engine_id,
            data_parallel_size=server.data_parallel_size,
            max_num_seqs=server.max_num_seqs or 0,
            block_size=server.block_size or 0,
        )

    async def tokenizer_bundle(self) -> tuple[bytes, str]:
        """The tokenizer archive and the SHA-256 its worker claims for it. Raises GRPCError, LinkError, DecodeError,
        WorkerUnavailable.
        """
        # Not by the generated stub: closing its generator early leaves the one inside it, and the call, open.
        call = await self._channel.call(GET_TOKENIZER, encode(GetTokenizerRequest()), timeout=TOKENIZER_TIMEOUT)
        archive = bytearray()
        claimed = ""
        try:
            while (message := await call.receive()) is not None:
                chunk = decode(GetTokenizerChunk, message)
                archive += chunk.data
                claimed = chunk.sha256
                if len(archive) > TOKENIZER_MAX_BYTES:
                    raise WorkerUnavailable(
                        f"the worker's tokenizer bundle is over {TOKENIZER_MAX_BYTES} bytes",
                        code="tokenizer_load_failed",
                    )
        finally:
            call.cancel()
        return bytes(archive), claimed
