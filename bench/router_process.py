"""The router alone in a process: both fronts, and nothing else that could cost CPU.

    python -m bench.router_process --plain HOST:PORT | --prefill HOST:PORT --decode HOST:PORT

With ports of its own choice, or given ones: another checkout can so be a peer of this one in `stream.py`. Prints one
line of JSON with the fronts' addresses once it is ready to serve.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

import trio

from trio_router.dispatch.router import RouterSettings, open_router
from trio_router.fleet.worker import WorkerRole, WorkerSpec
from trio_router.front.app import HttpFront
from trio_router.front.grpc import grpc_server
from trio_router.front.texts import BundleText
from trio_router.rpc.transport import open_tcp_listener

READY_SECONDS = 30.0


async def serve(workers: tuple[WorkerSpec, ...], *, grpc_port: int, http_port: int) -> None:
    """Serve until killed."""
    async with open_router(RouterSettings(workers=workers)) as router, trio.open_nursery() as nursery:
        with trio.fail_after(READY_SECONDS):
            await router.wait_ready()
            texts = BundleText(router)
            await texts.warm()
        grpc = await open_tcp_listener("127.0.0.1", port=grpc_port)
        http = await open_tcp_listener("127.0.0.1", port=http_port)
        await nursery.start(grpc_server(router).serve, grpc)
        await nursery.start(HttpFront(router, texts).serve, http)
        sys.stdout.write(json.dumps({"grpc": grpc.address, "http": http.address}) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for role in ("plain", "prefill", "decode"):
        parser.add_argument(f"--{role}", action="append", default=[], metavar="HOST:PORT")
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--http-port", type=int, default=0)
    options = parser.parse_args()
    given = {WorkerRole.PLAIN: options.plain, WorkerRole.PREFILL: options.prefill, WorkerRole.DECODE: options.decode}
    specs = [WorkerSpec(url=f"grpc://{at}", role=role) for role, addresses in given.items() for at in addresses]
    trio.run(partial(serve, tuple(specs), grpc_port=options.grpc_port, http_port=options.http_port))


if __name__ == "__main__":
    main()
