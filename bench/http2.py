"""What does one small gRPC message cost in the HTTP/2 layer, received and sent, beside the `h2` package?

    python -m bench.http2 [--messages 60000] [--repeat 5]

No sockets: a server connection writes, a client connection reads. A cell is a number of open streams and of 16-byte
messages per read (or write), which go to the streams in turn; figures are CPU-microseconds per message, the median of
the repeats, which are interleaved so that a busy machine disturbs both libraries alike. Receiving includes handing the
messages out and giving credit back; sending includes assembling the output. What reading the clock costs (over a
microsecond here and there) is measured and taken off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes

from trio_router.http2 import Connection, Http2Settings, Role, Stream
from trio_router.http2.framing import PREFIX, join

MESSAGE = bytes(range(16))
CELLS = [(1, 1), (1, 64), (64, 8), (64, 64), (64, 4096), (256, 64)]
REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/bench/Stream"), (b":authority", b"bench")]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]
# Neither side waits for credit inside one batch: the cost of credit is in the figures, stalls are not.
WINDOW = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """CPU seconds spent and messages moved."""

    received: float
    sent: float
    messages: int


class Ours:
    """Two of our connections."""

    name = "trio_router.http2"

    def __init__(self, streams: int) -> None:
        settings = Http2Settings(stream_window_bytes=WINDOW)
        self.client = Connection(Role.CLIENT, settings=settings)
        self.server = Connection(Role.SERVER, settings=settings)
        self.settle()
        for _ in range(streams):
            self.client.send_messages(self.client.open_stream(REQUEST), [b""], end_stream=True)
        self.writers: list[Stream] = self.server.receive(self.client.take_output())
        for stream in self.writers:
            self.server.send_headers(stream, RESPONSE)
        self.settle()

    def settle(self) -> None:
        """Exchange what is not measured."""
        while self.client.has_output or self.server.has_output:
            self.server.receive(self.client.take_output())
            self.client.receive(self.server.take_output())

    def send(self, turns: list[int]) -> bytes:
        """One message on each stream of `turns`."""
        server = self.server
        writers = self.writers
        for turn in turns:
            server.send_messages(writers[turn], [MESSAGE])
        return bytes(server.take_output())

    def receive(self, data: bytes) -> int:
        """Read, take, give credit back; how many messages came."""
        count = 0
        for stream in self.client.receive(data):
            count += len(stream.take())
            stream.credit()
        return count


class Reference:
    """The same over h2, with the least code that cuts gRPC messages and keeps the windows open."""

    name = "h2"

    def __init__(self, streams: int) -> None:
        def make(*, client: bool) -> h2.connection.H2Connection:
            config = h2.config.H2Configuration(client_side=client, header_encoding=None)
            connection = h2.connection.H2Connection(config=config)
            connection.initiate_connection()
            values = {SettingCodes.INITIAL_WINDOW_SIZE: WINDOW, SettingCodes.MAX_CONCURRENT_STREAMS: 2048}
            connection.update_settings(values)
            connection.increment_flow_control_window(WINDOW * 16)
            return connection

        self.client = make(client=True)
        self.server = make(client=False)
        self.settle()
        for number in range(streams):
            self.client.send_headers(1 + 2 * number, REQUEST)
            self.settle()
            self.server.send_headers(1 + 2 * number, RESPONSE)
        self.settle()

    def settle(self) -> None:
        """Exchange what is not measured."""
        while True:
            there, back = self.client.data_to_send(), self.server.data_to_send()
            if not there and not back:
                return
            self.server.receive_data(there)
            self.client.receive_data(back)

    def send(self, turns: list[int]) -> bytes:
        """One message on each stream of `turns`."""
        for turn in turns:
            self.server.send_data(1 + 2 * turn, PREFIX.pack(0, len(MESSAGE)) + MESSAGE)
        return self.server.data_to_send()

    def receive(self, data: bytes) -> int:
        """Read, cut, acknowledge; how many messages came."""
        count = 0
        for event in self.client.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                if len(event.data) == len(MESSAGE) + PREFIX.size and event.data[PREFIX.size :] == MESSAGE:
                    count += 1
                self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        return count


def measure(make: Callable[[int], Ours | Reference], *, streams: int, batch: int, messages: int) -> Sample:
    """Move about `messages` messages in batches and time the two halves apart."""
    pair = make(streams)
    received = sent = 0.0
    count = 0
    clock = clock_cost()
    for turns in batches(streams=streams, batch=batch, messages=messages):
        start = time.process_time()
        data = pair.send(turns)
        middle = time.process_time()
        got = pair.receive(data)
        received += time.process_time() - middle - clock
        sent += middle - start - clock
        if got != len(turns):
            raise AssertionError(f"{pair.name}: {got} of {len(turns)} messages arrived")
        count += got
        pair.settle()
    return Sample(received=received, sent=sent, messages=count)


def clock_cost(*, readings: int = 10_000) -> float:
    """CPU seconds of one reading of the clock."""
    start = time.process_time()
    for _ in range(readings):
        time.process_time()
    return (time.process_time() - start) / readings


def batches(*, streams: int, batch: int, messages: int) -> Iterator[list[int]]:
    """Stream numbers in turn, `batch` at a time."""
    turn = 0
    for _ in range(0, messages, batch):
        yield [(turn + step) % streams for step in range(batch)]
        turn = (turn + batch) % streams


def shared_frames(*, repeat: int) -> float:
    """CPU-microseconds per message received when 16 of them share a DATA frame, as our own sender packs a burst."""
    results = []
    clock = clock_cost()
    for _ in range(repeat):
        pair = Ours(1)
        burst = [MESSAGE] * 16
        spent, count = 0.0, 0
        for _ in range(2000):
            pair.server.send_messages(pair.writers[0], burst)
            data = bytes(pair.server.take_output())
            begin = time.process_time()
            count += pair.receive(data)
            spent += time.process_time() - begin - clock
            pair.settle()
        results.append(spent / count * 1e6)
    return statistics.median(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=60_000, help="per cell and repeat (h2 gets a tenth)")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"{'streams':>8} {'per read':>9} | {'in':>6} {'out':>6} | {'h2 in':>7} {'h2 out':>7}   CPU-us per message")
    for streams, batch in CELLS:
        samples: dict[str, list[Sample]] = {Ours.name: [], Reference.name: []}
        for _ in range(options.repeat):
            for make, messages in ((Ours, options.messages), (Reference, options.messages // 10)):
                samples[make.name].append(measure(make, streams=streams, batch=batch, messages=messages))
        ours, reference = (
            (
                statistics.median(sample.received / sample.messages for sample in taken) * 1e6,
                statistics.median(sample.sent / sample.messages for sample in taken) * 1e6,
            )
            for taken in samples.values()
        )
        print(f"{streams:>8} {batch:>9} | {ours[0]:>6.2f} {ours[1]:>6.2f} | {reference[0]:>7.2f} {reference[1]:>7.2f}")
    print(f"16 messages in one DATA frame of {len(join([MESSAGE] * 16))} bytes, in: {shared_frames(repeat=3):.2f}")


if __name__ == "__main__":
    main()
