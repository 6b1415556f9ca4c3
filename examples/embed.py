"""Dispatch through a prefill/decode pair from a trio program of your own: no server, no HTTP.

Start two reference workers first, each in a terminal of its own:

    trio-router worker --role prefill --port 50051
    trio-router worker --role decode --port 50052
"""

import trio

from trio_router import (
    GenerateRequest,
    RouterSettings,
    SamplingParams,
    TokenizedInput,
    WorkerRole,
    WorkerSpec,
    open_router,
)

SETTINGS = RouterSettings(
    workers=(
        WorkerSpec(url="grpc://127.0.0.1:50051", role=WorkerRole.PREFILL),
        WorkerSpec(url="grpc://127.0.0.1:50052", role=WorkerRole.DECODE),
    )
)


async def main() -> None:
    prompt = TokenizedInput(input_ids=[72, 101, 108, 108, 111], original_text="Hello")
    request = GenerateRequest(
        tokenized=prompt, sampling_params=SamplingParams(temperature=0.0, max_tokens=16), stream=True
    )

    async with open_router(SETTINGS) as router:
        with trio.fail_after(10):
            await router.wait_ready()
        async with router.generate(request, timeout=30) as stream:
            async for frame in stream:
                if not frame.is_complete:
                    print(frame.message().chunk.token_ids)
        # Leaving the block early would have ended the request on both workers; nothing is left to clean up.


if __name__ == "__main__":
    trio.run(main)
