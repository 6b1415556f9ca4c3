"""A gRPC client in a trio program: betterproto's generated stub, and a call of both directions at once by hand.

Start examples/grpc_server.py first.

    python examples/grpc_client.py 127.0.0.1:50060
"""

import sys
from contextlib import aclosing

import trio
from grpclib import GRPCError
from weather import Place, Report, WatchRequest, WeatherStub

from trio_router.rpc import Channel, open_channel


async def main(address: str) -> None:
    # Nothing is dialed before the first call. Every connection of the channel ends with the block.
    async with open_channel(address) as channel:
        weather = WeatherStub(channel)

        print("now:", await weather.now(Place(name="Oslo"), timeout=5))

        request = WatchRequest(place=Place(name="Oslo"), hours=3)
        async with aclosing(weather.watch(request, timeout=5)) as reports:
            async for report in reports:
                print("watch:", report)

        mean = await weather.mean([Report(celsius=celsius) for celsius in (10.0, 20.0)], timeout=5)
        print("mean:", mean.celsius)

        await follow(channel, ["Oslo", "Bergen"])

        try:
            await weather.now(Place(), timeout=5)
        except GRPCError as error:
            print("refused:", error)


async def follow(channel: Channel, names: list[str]) -> None:
    """The generated code cannot do this one on trio: send when there is something to say, read when there is room."""
    call = await channel.start("/weather.Weather/Follow", timeout=5)
    try:
        for name in names:
            await call.send(bytes(Place(name=name)))
            print("follow:", Report().parse(await call.receive() or b""))
        call.end_sending()
        await call.receive()  # None, for the call has ended well; it raises RpcError otherwise
    finally:
        call.cancel()  # does nothing when the call has ended


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50060")
