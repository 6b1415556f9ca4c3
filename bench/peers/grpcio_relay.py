"""The least relay that gRPC's own asyncio library allows: Generate passed on as bytes, no routing, no retries.

python -m bench.peers.grpcio_relay PORT WORKER_PORT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

SERVICE = "vllm.grpc.engine.VllmEngine"


async def main(port: int, worker_port: int) -> None:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{worker_port}")
    upstream: Any = channel.unary_stream(f"/{SERVICE}/Generate", None, None)

    async def generate(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        async for message in upstream(request):
            yield message

    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 2048)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
