"""The requests of the OpenAI API, as far as they mean something here; fields that are not named are ignored.

Types and ranges only: what a field does is `sampling`'s and the endpoints' business.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from ...errors import BadRequest, TooLarge

UINT32_MAX = 2**32 - 1
INT32_MAX = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=UINT32_MAX)]
BiasedId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
MAX_JSON_VALUES = 1_000_000
"""Of one body. What this many make of it is decoded in a tenth of a second, during which everybody waits."""
MAX_BIASES = 16_384
MAX_STOP_IDS = 4096
MAX_STOPS = 1024


class StreamOptions(Struct):
    include_usage: bool | None = None


class JsonSchema(Struct):
    name: str | None = None
    # Kept as the client wrote it: key order and number spelling reach the engine unchanged.
    schema: Raw = Raw(b"")


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchema | None = None


class GenerationRequest(Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    rid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[BiasedId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None


class MediaUrl(Struct):
    url: str
    # What OpenAI's models do with it has no counterpart here.
    detail: str | None = None
    max_long_side_pixel: Count | None = None
    fps: Annotated[float, Meta(gt=0)] | None = None


class InputAudio(Struct):
    data: str
    format: str | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None
    audio_url: str | MediaUrl | None = None
    input_audio: InputAudio | None = None
    # Some clients write these beside the item.
    max_long_side_pixel: Count | None = None
    fps: Annotated[float, Meta(gt=0)] | None = None


class Message(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


R = TypeVar("R", ChatRequest, CompletionRequest)

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    cls: msgspec.json.Decoder(cls) for cls in (ChatRequest, CompletionRequest)
}


def parse(cls: type[R], body: bytes) -> R:
    """Decode a request.

    Raises BadRequest, which names the field by its path (`$.stop[1]`) or says what is no JSON, and TooLarge.
    """
    # Each value but the first follows a comma or an opening bracket; those inside texts are counted with them, but a
    # text with so many of them is longer than any context.
    if len(body) > MAX_JSON_VALUES and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_JSON_VALUES:
        raise TooLarge(f"the body has more than {MAX_JSON_VALUES} commas and brackets, too many for one request")
    try:
        request: R = _DECODERS[cls].decode(body)
    except msgspec.ValidationError as exc:
        raise BadRequest(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(f"the body is not JSON: {exc}", code="malformed_json") from exc
    except RecursionError as exc:
        raise BadRequest("the body is nested too deeply", code="malformed_json") from exc
    return request
