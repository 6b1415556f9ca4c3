"""A relay that passes the calls of one service on, as the bytes they are: messages are never decoded.

    python examples/grpc_server.py 127.0.0.1:50060
    python examples/relay.py 127.0.0.1:50061 127.0.0.1:50060
    python examples/grpc_client.py 127.0.0.1:50061

A reply costs one synchronous function call. A client that reads slowly slows the server it is relayed from, and
nothing piles up in between. Whoever leaves, by a cancel, a deadline or a lost connection, ends the other half.
"""

import math
import sys

import trio

from trio_router.rpc import Channel, ClientCall, Server, ServerCall, listen, open_channel

PATHS = [f"/weather.Weather/{method}" for method in ("Now", "Watch", "Mean", "Follow")]


class Relay:
    """The handler of every path."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def handle(self, call: ServerCall) -> None:
        left = None if call.deadline == math.inf else call.deadline - trio.current_time()
        upstream = await self._channel.start(call.path, metadata=call.metadata, timeout=left)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_requests, call, upstream)
                # Replies: the reader of the upstream's connection hands each batch to `send_nowait`, which says False
                # when this client is behind. Then the server over there gets no more credit until it has caught up.
                call.on_drained = upstream.resume
                await upstream.pump(call.send_nowait, flush=call.flush)
                nursery.cancel_scope.cancel()  # the answer is complete, whatever of the request has not been sent
        finally:
            # What the upstream said of a failure is on its way to the client as the exception that leaves here.
            upstream.cancel()
            call.trailing_metadata = upstream.trailing_metadata

    async def _send_requests(self, call: ServerCall, upstream: ClientCall) -> None:
        while (message := await call.receive()) is not None:
            await upstream.send(message)
        upstream.end_sending()


async def main(address: str, upstream: str) -> None:
    listener = await listen(address)
    async with open_channel(upstream) as channel:
        server = Server(raw=dict.fromkeys(PATHS, Relay(channel).handle))
        print(f"relaying on {listener.address}", flush=True)
        await server.serve(listener)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: relay.py ADDRESS UPSTREAM")
    trio.run(main, *sys.argv[1:])
