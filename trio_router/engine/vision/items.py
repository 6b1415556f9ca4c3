"""Processed media as both legs know them: hashes, places in the prompt, and the small tensors that go with them.

Pure records, and tensors to and from the wire. A prefill worker makes these of references, a decode worker of what it
is told; the engine does not see which.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import betterproto

from ...errors import BadRequest, RouterError
from ...protocol.messages import TensorData

Numbers = tuple[int, ...] | tuple[float, ...]

GRID_KEYS: Final = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid")
"""What positions in the prompt are computed from; of all tensors only these are told to decode workers."""

WIRE_DTYPES: Final = {"float32": "f", "bfloat16": "H", "float16": "e", "uint8": "B", "int64": "q", "uint32": "I"}
"""The names that tensors may have on the wire, with the letters `struct` has for them."""


class ProcessingFailed(RouterError):
    """A request that real workers fail on rather than refuse: INTERNAL, though its sender caused it."""

    code = "multimodal_processing_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """A span of the prompt. `is_embed` says which of its tokens stand for embeddings; None: all of them.

    One that came over the wire may go beyond the prompt; `is_embed` then ends with the prompt.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def is_mixed(self) -> bool:
        return self.is_embed is not None and any(self.is_embed) and not all(self.is_embed)

    def embedded(self, *, prompt_length: int) -> list[int]:
        """The positions that embeddings take, in a prompt of that length."""
        places = range(self.offset, min(self.offset + self.length, prompt_length))
        if self.is_embed is None:
            return list(places)
        return [place for place, embeds in zip(places, self.is_embed, strict=False) if embeds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A small tensor in C order. `dtype` as the model has it, which need not be one of the wire's."""

    shape: tuple[int, ...]
    dtype: str
    values: Numbers
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All items of one kind, in prompt order."""

    kind: str
    hashes: tuple[str, ...]
    placeholders: tuple[Placeholder, ...] = ()
    fields: tuple[Mapping[str, Tensor], ...] = field(default=())
    """Of each item its own tensors; empty where none are known of any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """What a processor makes of a prompt and its references."""

    prompt: list[int]
    groups: tuple[Group, ...]


def write_tensor(tensor: Tensor) -> TensorData:
    """Inline, little-endian. A dtype that the wire does not know is widened to float32 or int64."""
    dtype = tensor.dtype if tensor.dtype in WIRE_DTYPES else _widened(tensor.dtype)
    values = tuple(map(_to_bfloat16, tensor.values)) if dtype == "bfloat16" else tensor.values
    packed = struct.pack(f"<{len(values)}{WIRE_DTYPES[dtype]}", *values)
    return TensorData(shape=list(tensor.shape), dtype=dtype, inline=packed)


def _widened(dtype: str) -> str:
    return "float32" if "float" in dtype else "int64"


def _to_bfloat16(value: float) -> int:
    """The upper half of a float32, rounded to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def read_tensor(name: str, data: TensorData) -> Tensor:
    """Raises BadRequest for what the servicer refuses."""
    kind, payload = betterproto.which_one_of(data, "payload")
    if kind != "inline" or not isinstance(payload, bytes):
        raise BadRequest(f"tensor {name!r}: payload {kind or 'none'}: this worker takes inline tensors only")
    code = WIRE_DTYPES.get(data.dtype)
    if code is None:
        raise BadRequest(f"tensor {name!r}: unsupported dtype {data.dtype[:32]!r}")
    count = math.prod(data.shape)
    if len(payload) != count * struct.calcsize(f"<{code}"):
        raise BadRequest(f"tensor {name!r}: {len(payload)} bytes are not {list(data.shape)} of {data.dtype}")
    values = struct.unpack(f"<{count}{code}", payload)
    if data.dtype == "bfloat16":
        values = tuple(struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in values)
    return Tensor(shape=tuple(data.shape), dtype=data.dtype, values=values)


def row_of(tensor: Tensor, index: int) -> Tensor:
    """One item's part of a tensor whose first axis counts items."""
    shape = tensor.shape[1:]
    size = math.prod(shape)
    return Tensor(shape=shape, dtype=tensor.dtype, values=tensor.values[index * size : (index + 1) * size])
