"""From the sampling fields of an OpenAI request to the engine's SamplingParams. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ...errors import BadRequest, Unsupported
from ...protocol.codec import make
from ...protocol.messages import SamplingParams
from .schema import INT32_MAX, GenerationRequest, ResponseFormat

MAX_STOP_CHARACTERS: Final = 4096
"""Of one request: looking for them takes 300 bytes of memory for each (`text.stops`)."""
ANY_OBJECT: Final = '{"type":"object"}'
_NO_DEFAULTS: Final[Mapping[str, float]] = MappingProxyType({})


def sampling_params(
    request: GenerationRequest, *, max_tokens: int | None, defaults: Mapping[str, float] = _NO_DEFAULTS
) -> SamplingParams:
    """Map a request. `defaults` are the model's recommendations: used where the client said nothing, before ours.

    An absent limit stays absent: the engine knows what the context leaves. Raises BadRequest for constraints that
    exclude one another, Unsupported for what is not built.
    """
    if request.prompt_logprobs is not None:
        raise Unsupported("prompt_logprobs is not supported")
    chosen = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
    }
    chosen = {name: defaults.get(name) if value is None else value for name, value in chosen.items()}
    return make(
        SamplingParams,
        temperature=chosen["temperature"],
        top_p=_or(chosen["top_p"], 1.0),
        top_k=max(0, int(_or(chosen["top_k"], 0))),  # -1 is "all" to clients, 0 is to the engine
        min_p=_or(chosen["min_p"], 0.0),
        repetition_penalty=_or(chosen["repetition_penalty"], 1.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=stop_strings(request),
        stop_token_ids=request.stop_token_ids or [],
        # What a client may see is decided here; the engine's own text only serves its stop strings.
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=bool(request.ignore_eos),
        n=request.n or 1,
        seed=None if request.seed is None else max(-INT32_MAX - 1, min(request.seed, INT32_MAX)),
        include_stop_str_in_output=bool(request.no_stop_trim),
        logit_bias=dict(request.logit_bias or {}),
        **constraint(request),
    )


def stop_strings(request: GenerationRequest) -> list[str]:
    """The request's stop strings; empty ones are ignored. Raises BadRequest for more than can be looked for."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise BadRequest(f"stop: at most {MAX_STOP_CHARACTERS} characters of stop strings in all")
    return [stop for stop in stops if stop]


def constraint(request: GenerationRequest) -> dict[str, str]:
    """The one member of SamplingParams.constraint that the request asks for, by name, or nothing."""
    wanted = {} if request.response_format is None else _of_format(request.response_format)
    if request.regex is not None:
        wanted["regex"] = request.regex
    if request.ebnf is not None:
        wanted["grammar"] = request.ebnf
    if len(wanted) > 1:
        raise BadRequest("only one of response_format, regex and ebnf can constrain the output")
    return wanted


def _of_format(wanted: ResponseFormat) -> dict[str, str]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            schema = bytes(wanted.json_schema.schema) if wanted.json_schema is not None else b""
            if not schema.startswith(b"{"):
                raise BadRequest("response_format.json_schema.schema must be an object")
            return {"json_schema": schema.decode()}
        case other:
            raise BadRequest(f"response_format.type must be text, json_object or json_schema, not {other!r}")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
