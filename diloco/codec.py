"""Codecs: what an island's contribution is on the wire, from four bytes per value down to little more than half of one.

| name | bytes for n values | a value is off by at most |
|---|---|---|
| ``fp32`` | 4n | 0 |
| ``bf16`` | 2n | 2^-8 of itself |
| ``int8`` | n + 2⌈n/64⌉ | 1/254 of the largest in its block, and 1 % of that |
| ``int4`` | ⌈n/2⌉ + 2⌈n/64⌉ | 1/14 of the largest in its block, and 1 % of that |

The last two are symmetric block quantisation (Dettmers et al., 2022, arXiv 2110.02861): 64 neighbours share one scale

    s = max|x| / Q rounded up to bf16,   code = ⌊x/s + 1/2⌋,   x' = s · code,   Q = 127 or 7

bf16 has the exponents of fp32, so scales neither overflow nor vanish where pseudo-gradients are small, as they would in
fp16. Rounding up keeps every code within ±Q, and s · code has at most 16 significant bits: decoding is exact in fp32,
the same on every machine. A block whose scale would be under 2^-126, the least normal number, is sent as zeros.

Codes are stored as code + Q + 1, without sign: int4 puts two in a byte, the earlier value in the lower half. All scales
come first, then all codes; the last block may be short. Bytes are little-endian.

``fp32`` carries local parameters, the others the pseudo-gradient: differences of parameters survive few bits,
parameters do not (see `diloco.feedback` for what becomes of that which is lost). For the same reason new global
parameters travel as their difference from the ones before, where they do not travel as fp32 (see `diloco.delta`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import ceil
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from diloco.schema import CodecName
from service.errors import InputError

FP32_BYTES = 4
BF16_BYTES = 2
BLOCK = 64
"""Values that share a scale: with 16 bits for it int4 takes 4.25 bits per value."""
CHUNK = 1 << 18
"""Values that are worked on at once, a multiple of `BLOCK`: so many that the calls cost little, and so few that what
one pass writes is in the cache for the next."""
MAX_ABS = 2.0**126
"""Largest absolute value that is encoded: decoded, even rounded up, it is still finite."""
MIN_SCALE = 2.0**-126
"""Below it the reciprocal of a scale would overflow."""


class Codec(ABC):
    """Turns a vector into bytes and back, the same bytes for the same vector every time."""

    name: CodecName
    carries_parameters = False
    """Whether contributions hold local parameters instead of their pseudo-gradient, with nothing lost."""

    @abstractmethod
    def num_bytes(self, num_values: int) -> int:
        """Size of so many values, encoded."""

    def encode(self, flat: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The bytes (uint8, 1-d) of a contiguous 1-d fp32 vector; they may share its memory.

        They are written to ``out``, of `num_bytes`, where that is given and they do not.

        Raises:
            InputError: a value is NaN, infinite, or beyond `MAX_ABS`.
        """
        if flat.dtype != torch.float32 or flat.dim() != 1:
            raise ValueError(f"codecs take 1-d fp32 vectors, this one is {flat.dim()}-d {flat.dtype}")
        return self._encode(flat.detach().contiguous(), out)

    def decode(self, payload: Tensor, num_values: int) -> Tensor:
        """The fp32 vector that the bytes stand for; it may share their memory.

        Raises:
            InputError: there are not as many bytes as so many values take.
        """
        if payload.numel() != self.num_bytes(num_values):
            raise _wrong_size(self, payload, num_values)
        return self._decode(payload.contiguous(), num_values)

    def accumulate(self, payload: Tensor, out: Tensor, *, alpha: float = 1.0) -> Tensor:
        """Add ``alpha`` times the decoded vector to ``out``, with no memory for the whole of it; returns ``out``.

        Value for value it is ``out.add_(decode(payload), alpha=alpha)``, the same on every machine for ``alpha`` ±1.

        Raises:
            InputError: there are not as many bytes as so many values take.
        """
        if payload.numel() != self.num_bytes(out.numel()):
            raise _wrong_size(self, payload, out.numel())
        self._accumulate(payload.contiguous(), out, alpha)
        return out

    def decode_part(self, payload: Tensor, num_values: int, start: int, room: Tensor) -> Tensor:
        """The values from ``start`` on, a multiple of `BLOCK`, as many as ``room`` has: written there, or a view.

        Raises:
            InputError: there are not as many bytes as ``num_values``, which are all, take.
        """
        if payload.numel() != self.num_bytes(num_values):
            raise _wrong_size(self, payload, num_values)
        return self._decode_part(payload, num_values, start, room)

    def norm_bound(self, payload: Tensor, num_values: int) -> float:
        """What the L2 norm of the values is at most, if less than decoding them tells; infinity or NaN if not."""
        return math.inf

    @abstractmethod
    def _encode(self, flat: Tensor, out: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _decode_part(self, payload: Tensor, num_values: int, start: int, room: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, num_values: int) -> Tensor: ...

    @abstractmethod
    def _accumulate(self, payload: Tensor, out: Tensor, alpha: float) -> None: ...


class Fp32Codec(Codec):
    """The vector's own bytes."""

    name = "fp32"
    carries_parameters = True

    def num_bytes(self, num_values: int) -> int:
        return FP32_BYTES * num_values

    def _encode(self, flat: Tensor, out: Tensor | None) -> Tensor:
        for start, part in _chunks(flat):
            _require_encodable(part, start)
        return flat.view(torch.uint8)

    def _decode(self, payload: Tensor, num_values: int) -> Tensor:
        return payload.view(torch.float32)

    def _decode_part(self, payload: Tensor, num_values: int, start: int, room: Tensor) -> Tensor:
        return payload.view(torch.float32)[start : start + room.numel()]

    def _accumulate(self, payload: Tensor, out: Tensor, alpha: float) -> None:
        out.add_(payload.view(torch.float32), alpha=alpha)


class Bf16Codec(Codec):
    """Rounded to nearest, ties to even."""

    name = "bf16"

    def num_bytes(self, num_values: int) -> int:
        return BF16_BYTES * num_values

    def _encode(self, flat: Tensor, out: Tensor | None) -> Tensor:
        payload = new_bytes(self.num_bytes(flat.numel())) if out is None else out
        rounded = payload.view(torch.bfloat16)
        for start, part in _chunks(flat):
            _require_encodable(part, start)
            rounded[start : start + part.numel()].copy_(part)
        return payload

    def _decode(self, payload: Tensor, num_values: int) -> Tensor:
        return new_vector(num_values).copy_(payload.view(torch.bfloat16))

    def _decode_part(self, payload: Tensor, num_values: int, start: int, room: Tensor) -> Tensor:
        return room.copy_(payload.view(torch.bfloat16)[start : start + room.numel()])

    def _accumulate(self, payload: Tensor, out: Tensor, alpha: float) -> None:
        rounded = payload.view(torch.bfloat16)
        for start, part in _chunks(out):
            part.add_(rounded[start : start + part.numel()].to(torch.float32), alpha=alpha)


class BlockCodec(Codec):
    """Codes of 4 or 8 bits and a bf16 scale per block."""

    def __init__(self, name: CodecName, *, bits: int) -> None:
        self.name = name
        self._bits = bits
        self._zero = 1 << (bits - 1)
        self._largest = self._zero - 1
        self._offset = self._zero + 0.5
        """The half makes truncation round to the nearest."""

    def num_bytes(self, num_values: int) -> int:
        return BF16_BYTES * ceil(num_values / BLOCK) + self._num_code_bytes(num_values)

    def _num_code_bytes(self, num_values: int) -> int:
        return ceil(num_values * self._bits / 8)

    def _encode(self, flat: Tensor, out: Tensor | None) -> Tensor:
        payload = new_bytes(self.num_bytes(flat.numel())) if out is None else out
        scales, codes = self._parts(payload, flat.numel())
        scratch = torch.empty(min(flat.numel() + BLOCK, CHUNK))
        for start, part in _chunks(flat):
            blocks = _in_blocks(part)
            first = start // BLOCK
            found = self._encode_blocks(blocks, scales[first : first + len(blocks)], scratch[: blocks.numel()])
            if found is None:
                raise _refused(part, start)
            place = codes[self._num_code_bytes(start) : self._num_code_bytes(start + part.numel())]
            place.copy_(self._pack(found)[: place.numel()])
        return payload

    def _encode_blocks(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor | None:
        """The codes of (blocks, 64) values, whose scales are filled in; None if there are values that have none."""
        scratch = scratch.view_as(blocks)
        largest = torch.abs(blocks, out=scratch).amax(dim=1)
        if not float(largest.max()) <= MAX_ABS:
            return None
        scale = _rounded_up_to_bf16(largest.div_(self._largest))
        negligible = scale < MIN_SCALE
        scales.copy_(scale.masked_fill_(negligible, 0.0))
        inverse = scale.reciprocal_().masked_fill_(negligible, 0.0)
        torch.mul(blocks, inverse[:, None], out=scratch).add_(self._offset)
        # By way of 16 bits, for which the conversion is vectorised: six times faster.
        return scratch.view(-1).to(torch.int16).to(torch.uint8)

    def _decode(self, payload: Tensor, num_values: int) -> Tensor:
        flat = new_vector(num_values)
        parts = self._parts(payload, num_values)
        for start, part in _chunks(flat):
            self._fill(parts, start, part)
        return flat

    def _decode_part(self, payload: Tensor, num_values: int, start: int, room: Tensor) -> Tensor:
        self._fill(self._parts(payload, num_values), start, room)
        return room

    def norm_bound(self, payload: Tensor, num_values: int) -> float:
        scales, _ = self._parts(payload, num_values)
        # No code is farther from zero than the one that stands for nothing.
        return self._zero * math.sqrt(BLOCK) * float(torch.linalg.vector_norm(scales.to(torch.float64)))

    def _accumulate(self, payload: Tensor, out: Tensor, alpha: float) -> None:
        scratch = torch.empty(min(out.numel(), CHUNK))
        parts = self._parts(payload, out.numel())
        for start, part in _chunks(out):
            decoded = scratch[: part.numel()]
            self._fill(parts, start, decoded)
            part.add_(decoded, alpha=alpha)

    def _fill(self, parts: tuple[Tensor, Tensor], start: int, part: Tensor) -> None:
        """Fill in the values from ``start`` on."""
        scales, codes = parts
        stored = codes[self._num_code_bytes(start) : self._num_code_bytes(start + part.numel())]
        part.copy_(self._unpack(stored)[: part.numel()])
        blocks, first = _in_blocks(part), start // BLOCK
        blocks.sub_(self._zero).mul_(scales[first : first + len(blocks)].to(torch.float32)[:, None])
        if blocks.data_ptr() != part.data_ptr():
            part.copy_(blocks.view(-1)[: part.numel()])

    def _parts(self, payload: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
        """Scales and codes."""
        end = BF16_BYTES * ceil(num_values / BLOCK)
        return payload[:end].view(torch.bfloat16), payload[end:]

    def _pack(self, codes: Tensor) -> Tensor:
        if self._bits == 8:
            return codes
        pairs = codes.view(torch.int16)  # earlier | later << 8
        return ((pairs >> 4) | pairs).to(torch.uint8)  # the cast keeps the lower byte

    def _unpack(self, stored: Tensor) -> Tensor:
        if self._bits == 8:
            return stored
        pairs = stored.to(torch.int16)
        return ((pairs << 4) | pairs).bitwise_and_(0x0F0F).view(torch.uint8)


CODECS: dict[CodecName, Codec] = {
    "fp32": Fp32Codec(),
    "bf16": Bf16Codec(),
    "int8": BlockCodec("int8", bits=8),
    "int4": BlockCodec("int4", bits=4),
}


def codec_named(name: str) -> Codec:
    """The codec of that name.

    Raises:
        InputError: there is none.
    """
    for known in get_args(CodecName):
        if name == known:
            return CODECS[known]
    raise InputError(
        f"{name!r} is none of {', '.join(CODECS)}",
        field="codec",
        remedy="start the island with one of these as --codec, and both ends from the same version",
    )


def new_bytes(num_bytes: int) -> Tensor:
    """Uninitialised uint8. NumPy asks for huge pages, without which first touches cost more than all else here."""
    # Of nothing, NumPy's strides are such as torch takes no view of.
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)) if num_bytes else torch.empty(0, dtype=torch.uint8)


def new_vector(num_values: int) -> Tensor:
    """Uninitialised fp32, in the same way."""
    return torch.from_numpy(np.empty(num_values, dtype=np.float32))


def _chunks(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Parts of a vector that fit the cache, with where they start."""
    for start in range(0, flat.numel(), CHUNK):
        yield start, flat[start : start + CHUNK]


def _in_blocks(part: Tensor) -> Tensor:
    """(blocks, 64): the part itself, or a copy with zeros behind it where the last block is short."""
    missing = -part.numel() % BLOCK
    return (torch.nn.functional.pad(part, (0, missing)) if missing else part).view(-1, BLOCK)


def _rounded_up_to_bf16(values: Tensor) -> Tensor:
    """Non-negative fp32 values, in place: the least bf16 numbers that are not below them."""
    values.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return values


def _require_encodable(part: Tensor, start: int) -> None:
    low, high = torch.aminmax(part)  # both NaN where one value is
    if not max(-float(low), float(high)) <= MAX_ABS:
        raise _refused(part, start)


def _wrong_size(codec: Codec, payload: Tensor, num_values: int) -> InputError:
    return InputError(
        f"{num_values} values take {codec.num_bytes(num_values)} bytes as {codec.name}, there are {payload.numel()}",
        field="payload",
        remedy="encode the same model with the codec that is named",
    )


def _refused(part: Tensor, start: int) -> InputError:
    """The error for the first value in the part that cannot be encoded."""
    bad = ~(part.abs() <= MAX_ABS)
    index = start + int(torch.argmax(bad.to(torch.uint8)))
    return InputError(
        f"value {index} is {float(part[index - start]):g}, which is not finite or beyond 2^126",
        field="contribution",
        remedy="lower lr or clip_norm",
    )
