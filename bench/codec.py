"""What does a message cost to read and write: by our codec, by betterproto's own, and by google's in C?

Run `python -m bench.codec`. CPU microseconds per message, best of the rounds, one thread. A chunk carries one token
id, a request 2,048 of them. The last two columns say how many times our cost the others need.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from trio_router.protocol.codec import decode, encode
from trio_router.protocol.messages import (
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    SamplingParams,
    TokenizedInput,
)
from trio_router.protocol.wire import edit, field_bytes, field_varint, get_string, is_complete, scan_chunk

ROUNDS = 7
ROUND_SECONDS = 0.05
PROTOS = Path(__file__).resolve().parents[1] / "protos"
PACKAGE = "vllm.grpc.engine"
Run = Callable[[], object]


def microseconds(run: Run) -> float:
    """CPU time of one call."""
    run()  # fills what is filled on first use
    start = time.process_time_ns()
    run()
    calls = max(1, round(ROUND_SECONDS * 1e9 / max(1, time.process_time_ns() - start)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time_ns()
        for _ in range(calls):
            run()
        best = min(best, (time.process_time_ns() - start) / calls)
    return best / 1000


def google_classes() -> Callable[[str], Any]:
    """Google's class of a message, by its name in the engine protocol."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "descriptors"
        names = ("common.proto", "vllm_engine.proto")
        protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={target}", *names])
        files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def compare(name: str, ours: Run, *, betterproto: Run, google: Run) -> None:
    """Prints one line of the table with peers."""
    us, beta, goog = microseconds(ours), microseconds(betterproto), microseconds(google)
    print(f"{name:24}{us:9.2f}{beta:13.2f}{goog:9.2f}{beta / us:14.1f}x{goog / us:14.2f}x")


def main() -> None:
    """Measure and print."""
    ids = random.Random(1).choices(range(150_000), k=2048)
    chunk = GenerateResponse(
        chunk=GenerateStreamChunk(token_ids=[91234], prompt_tokens=2048, completion_tokens=1, cached_tokens=16)
    )
    complete = GenerateResponse(
        complete=GenerateComplete(output_ids=ids, finish_reason="length", kv_transfer_params_json='{"a": 1}')
    )
    request = GenerateRequest(
        request_id="9f0a7c",
        tokenized=TokenizedInput(input_ids=ids),
        sampling_params=SamplingParams(temperature=0.7, max_tokens=256, stop=["\n\n"], n=1),
        stream=True,
    )
    google = google_classes()
    print(f"{'CPU us':24}{'ours':>9}{'betterproto':>13}{'google':>9}{'bproto / ours':>15}{'google / ours':>15}")
    for name, message in (("chunk", chunk), ("request", request), ("complete", complete)):
        cls, wire = type(message), encode(message)
        theirs = google(cls.__name__)
        parsed = theirs.FromString(wire)
        compare(
            f"{name} decode", partial(decode, cls, wire),
            betterproto=lambda cls=cls, wire=wire: cls().parse(wire), google=partial(theirs.FromString, wire),
        )  # fmt: skip
        compare(
            f"{name} encode", partial(encode, message),
            betterproto=partial(bytes, message), google=parsed.SerializeToString,
        )  # fmt: skip
    print()
    small, large = encode(chunk), encode(request)
    two = encode(GenerateResponse(chunk=GenerateStreamChunk(token_ids=[91234, 7], prompt_tokens=2048)))
    edits = {(1,): field_bytes(1, b"9f0a7c-p"), (5,): None, (8,): field_bytes(8, b"{}"), (4, 8): field_varint(8, 1)}
    rows: list[tuple[str, Run]] = [
        ("scan a chunk of one id", partial(scan_chunk, small)),
        ("scan a chunk of two ids", partial(scan_chunk, two)),
        ("is it complete", partial(is_complete, small)),
        ("edit four fields", partial(edit, large, edits)),
        ("read one field", partial(get_string, large, (1,))),
    ]
    for name, run in rows:
        print(f"{name:24}{microseconds(run):9.2f}")


if __name__ == "__main__":
    main()
