"""A gRPC server in a trio program: betterproto's generated service base, and a stop that lets calls finish.

    python examples/grpc_server.py 127.0.0.1:50060

Then run examples/grpc_client.py beside it. A UNIX socket will do, too: `unix:/tmp/weather.sock`.
"""

import signal
import sys
from collections.abc import AsyncIterator

import trio
from grpclib import GRPCError, Status
from weather import Place, Report, WatchRequest, WeatherBase

from trio_router.rpc import Server, listen

GRACE_SECONDS = 10


class Weather(WeatherBase):
    """Each method takes messages and gives messages. It is cancelled when its client leaves, or is late."""

    async def now(self, place: Place) -> Report:
        if not place.name:
            raise GRPCError(Status.INVALID_ARGUMENT, "name: is empty")
        return Report(place=place.name, hour=12, celsius=float(len(place.name)))

    async def watch(self, watch_request: WatchRequest) -> AsyncIterator[Report]:
        for hour in range(watch_request.hours):
            # A client that does not read stops us here, as soon as it is a window (64 KiB) behind.
            yield Report(place=watch_request.place.name, hour=hour, celsius=hour / 2)

    async def mean(self, report_iterator: AsyncIterator[Report]) -> Report:
        celsius = [report.celsius async for report in report_iterator]
        return Report(celsius=sum(celsius) / len(celsius)) if celsius else Report()

    async def follow(self, place_iterator: AsyncIterator[Place]) -> AsyncIterator[Report]:
        async for place in place_iterator:
            yield await self.now(place)


async def main(address: str) -> None:
    listener = await listen(address)
    server = Server([Weather()])
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listener)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            print(f"serving on {listener.address}", flush=True)
            await anext(signals)
        # `serve` returns when the last call has ended, and is cancelled when that takes too long.
        server.drain()
        nursery.cancel_scope.deadline = trio.current_time() + GRACE_SECONDS
    print("stopped")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50060")
