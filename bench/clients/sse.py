"""An HTTP load client in a process of its own: streams chat completions over plain sockets and counts their events.

    python -m bench.clients.sse ADDRESS --streams 64 --tokens 200 --least 40000 --pid router=123

One kept-alive connection per stream. It parses nothing but what ends an event and what ends a response, so that it
costs little. Prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time

from bench.clients.options import Job, Outcome, report, take_job
from bench.measure import Meter

MODEL = "tiny-english"
PATIENCE_SECONDS = 60.0
READ_BYTES = 262_144
TAIL_BYTES = 1024
BODY_END = b"0\r\n\r\n"
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class Client:
    """One connection, one response at a time."""

    __slots__ = ("events", "reads", "sock", "tail")

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.events = 0
        self.reads = 0
        self.tail = b""

    def ask(self, request: bytes) -> None:
        self.tail = b""
        self.sock.sendall(request)

    def read(self) -> bool:
        """Take what has come; True at the end of the response."""
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise AssertionError(f"the router closed the connection after {self.tail!r}")
        self.reads += 1
        # An event ends with an empty line; its two newlines may come in two reads.
        self.events += data.count(b"\n\n") + (self.tail[-1:] == b"\n" == data[:1])
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        return self.tail.endswith(BODY_END)

    def check(self, *, tokens: int) -> None:
        """Raises if the response was no whole stream of so many tokens. Not every server tells the usage."""
        said = COMPLETION_TOKENS.search(self.tail)
        if b"[DONE]" not in self.tail or (said is not None and int(said[1]) != tokens):
            raise AssertionError(f"not a whole stream of {tokens} tokens: ...{self.tail!r}")


def make_request(address: str, *, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a long story about the harbour."}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def play_round(clients: list[Client], selector: selectors.BaseSelector, *, address: str, tokens: int) -> None:
    """Every client asks once and reads its response to the end."""
    request = make_request(address, tokens=tokens)
    for client in clients:
        client.ask(request)
    waiting = len(clients)
    while waiting:
        ready = selector.select(PATIENCE_SECONDS)
        if not ready:
            raise AssertionError(f"{waiting} streams have been silent for {PATIENCE_SECONDS:g} s")
        for key, _ in ready:
            reader: Client = key.data
            if reader.read():
                reader.check(tokens=tokens)
                waiting -= 1


def run(job: Job) -> Outcome:
    meter = Meter(job.processes)
    selector = selectors.DefaultSelector()
    clients = [Client(job.address) for _ in range(job.streams)]
    for client in clients:
        selector.register(client.sock, selectors.EVENT_READ, client)
    play_round(clients, selector, address=job.address, tokens=job.warm_up_tokens)
    for client in clients:
        client.events = client.reads = 0
    tokens = 0
    meter.start()
    begun, own = time.perf_counter(), time.process_time()
    while tokens < job.least:
        play_round(clients, selector, address=job.address, tokens=job.tokens)
        tokens += job.streams * job.tokens
    wall, own = time.perf_counter() - begun, time.process_time() - own
    return Outcome(
        tokens=tokens,
        requests=tokens // job.tokens,
        wall=wall,
        cpu=meter.stop() | {"client": own},
        reads=sum(client.reads for client in clients),
        events=sum(client.events for client in clients),
    )


if __name__ == "__main__":
    report(run(take_job(__doc__)))
