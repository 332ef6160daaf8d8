"""One contract for all codecs: size, bounds, determinism, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from diloco.codec import BLOCK, CHUNK, CODECS, MAX_ABS, MIN_SCALE, Codec, codec_named
from service.errors import InputError

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
lossy = pytest.mark.parametrize("codec", [CODECS["bf16"], CODECS["int8"], CODECS["int4"]], ids=["bf16", "int8", "int4"])
LARGEST_CODE = {"int8": 127, "int4": 7}
SIZE_OF: dict[str, Callable[[int], int]] = {
    "fp32": lambda n: 4 * n,
    "bf16": lambda n: 2 * n,
    "int8": lambda n: n + 2 * -(-n // 64),
    "int4": lambda n: -(-n // 2) + 2 * -(-n // 64),
}

values = st.floats(min_value=-MAX_ABS, max_value=MAX_ABS, width=32)
small_values = st.floats(min_value=-1.0, max_value=1.0, width=32)
vectors = st.one_of(st.lists(values, max_size=200), st.lists(small_values, max_size=200)).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float32)
)


def round_trip(codec: Codec, flat: Tensor) -> Tensor:
    return codec.decode(codec.encode(flat), flat.numel())


def wide(flat: Tensor) -> NDArray[np.float64]:
    return flat.numpy().astype(np.float64)


def bound(codec: Codec, flat: Tensor) -> NDArray[np.float64]:
    """How far a decoded value may be off."""
    exact = wide(flat)
    if codec.name == "fp32":
        return np.zeros_like(exact)
    if codec.name == "bf16":
        return np.abs(exact) * 2.0**-8 + 2.0**-134
    blocks = np.pad(np.abs(exact), (0, -len(exact) % BLOCK)).reshape(-1, BLOCK)
    largest = blocks.max(axis=1)
    sent_as_zeros = MIN_SCALE * LARGEST_CODE[codec.name]
    per_block = np.where(largest < sent_as_zeros, largest, 1.01 * largest / LARGEST_CODE[codec.name] / 2)
    off: NDArray[np.float64] = per_block.repeat(BLOCK)[: len(exact)]
    return off


def noise(size: int, *, seed: int = 0, scale: float = 1e-3) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@every_codec
@given(flat=vectors)
def test_a_decoded_value_is_within_its_bound(codec: Codec, flat: Tensor) -> None:
    decoded = round_trip(codec, flat)
    assert decoded.shape == flat.shape
    assert decoded.dtype == torch.float32
    assert torch.isfinite(decoded).all()
    assert (np.abs(wide(decoded) - wide(flat)) <= bound(codec, flat)).all()


@every_codec
@given(size=st.integers(0, 10**9))
def test_the_size_follows_from_the_number_of_values(codec: Codec, size: int) -> None:
    assert codec.num_bytes(size) == SIZE_OF[codec.name](size)


@every_codec
@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 127, 129, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 65])
def test_every_size_has_as_many_bytes_as_it_says(codec: Codec, size: int) -> None:
    flat = noise(size)
    payload = codec.encode(flat)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.num_bytes(size)
    assert (np.abs(wide(codec.decode(payload, size)) - wide(flat)) <= bound(codec, flat)).all()


def test_four_bits_take_a_seventh_at_most() -> None:
    assert CODECS["int4"].num_bytes(20_000_000) * 7 <= 4 * 20_000_000


@every_codec
def test_the_same_vector_gives_the_same_bytes_and_stays_as_it_was(codec: Codec) -> None:
    flat = noise(3 * CHUNK + 5)
    before = flat.clone()
    first = codec.encode(flat).clone()
    torch.full((4 * CHUNK,), torch.nan)  # what memory held before must not matter
    assert torch.equal(codec.encode(flat.clone()), first)
    codec.decode(first, flat.numel())
    assert torch.equal(flat.view(torch.int32), before.view(torch.int32))


@every_codec
@given(whole_blocks=st.integers(0, 3), rest=st.integers(0, 130), seed=st.integers(0, 99))
def test_whole_blocks_and_what_follows_them_do_not_touch(codec: Codec, whole_blocks: int, rest: int, seed: int) -> None:
    a, b = noise(whole_blocks * BLOCK, seed=seed), noise(rest, seed=seed + 1, scale=50.0)
    together = round_trip(codec, torch.cat([a, b]))
    assert torch.equal(together, torch.cat([round_trip(codec, a), round_trip(codec, b)]))


@every_codec
def test_zeros_stay_zeros_beside_other_blocks(codec: Codec) -> None:
    flat = torch.zeros(3 * BLOCK + 7)
    flat[BLOCK : 2 * BLOCK] = noise(BLOCK)
    decoded = round_trip(codec, flat)
    assert not decoded[:BLOCK].any()
    assert not decoded[2 * BLOCK :].any()
    assert decoded[BLOCK : 2 * BLOCK].any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_block_keeps_the_sign_and_the_place_of_its_values(name: str) -> None:
    largest = LARGEST_CODE[name]
    codes = torch.arange(-largest, largest + 1, dtype=torch.float32)
    scale = 2.0**-20  # a bf16 number, so that the codes are met exactly
    flat = torch.cat([torch.cat([codes, codes.new_full((-len(codes) % BLOCK,), float(largest))]) * scale] * 2)
    flat.view(-1, BLOCK)[:, 0] = largest * scale
    assert torch.equal(round_trip(codec_named(name), flat), flat)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_small_block_beside_a_large_one_keeps_its_own_scale(name: str) -> None:
    small, large = noise(BLOCK, scale=1e-6), noise(BLOCK, seed=1, scale=1e6)
    decoded = round_trip(codec_named(name), torch.cat([small, large]))
    assert float((decoded[:BLOCK] - small).abs().max()) < 1e-6


@lossy
def test_denormal_values_come_back_as_small_as_they_are_or_as_zero(codec: Codec) -> None:
    flat = torch.full((BLOCK,), 1e-45)
    assert float(round_trip(codec, flat).abs().max()) <= 1e-40


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2 * MAX_ABS])
@pytest.mark.parametrize("place", [0, 70, CHUNK + 3])
def test_what_is_not_finite_is_refused_with_its_place(codec: Codec, value: float, place: int) -> None:
    flat = noise(CHUNK + 5)
    flat[place] = value
    with pytest.raises(InputError, match=f"value {place} is .* not finite or beyond"):
        codec.encode(flat)


@every_codec
def test_the_largest_values_are_still_finite_when_decoded(codec: Codec) -> None:
    flat = torch.tensor([MAX_ABS, -MAX_ABS, 1.0])
    assert torch.isfinite(round_trip(codec, flat)).all()


@every_codec
@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_bytes_is_refused(codec: Codec, change: int) -> None:
    payload = torch.zeros(codec.num_bytes(100) + change, dtype=torch.uint8)
    with pytest.raises(InputError, match="100 values take"):
        codec.decode(payload, 100)


@every_codec
@pytest.mark.parametrize("flat", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)])
def test_only_flat_fp32_is_encoded(codec: Codec, flat: Tensor) -> None:
    with pytest.raises(ValueError, match="1-d fp32"):
        codec.encode(flat)


def test_an_unknown_codec_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="'int3' is none of fp32, bf16, int8, int4") as caught:
        codec_named("int3")
    assert caught.value.field == "codec"
    assert "--codec" in str(caught.value.remedy)


@every_codec
@pytest.mark.parametrize("size", [1, BLOCK, CHUNK + BLOCK + 5])
def test_parts_decode_to_the_bits_of_the_whole(codec: Codec, size: int) -> None:
    payload = codec.encode(noise(size)).clone()
    step = 3 * BLOCK * 101
    parts = [
        codec.decode_part(payload, size, start, torch.empty(min(step, size - start))).clone()
        for start in range(0, size, step)
    ]
    assert torch.equal(torch.cat(parts), codec.decode(payload, size))
    with pytest.raises(InputError, match="values take"):
        codec.decode_part(payload[:-1], size, 0, torch.empty(1))


@every_codec
@given(payload=st.binary(min_size=102, max_size=102))
def test_no_vector_is_longer_than_its_bound(codec: Codec, payload: bytes) -> None:
    """Whatever the bytes are, also such as nobody encoded."""
    num_values = {"fp32": 25, "bf16": 51, "int8": 100, "int4": 200}[codec.name]
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if codec.name == "int4":
        raw = torch.cat([raw, raw[:6]])
    if codec.name == "int8":
        raw = torch.cat([raw, raw[:2]])
    raw = raw[: codec.num_bytes(num_values)].clone()
    decoded = codec.decode(raw, num_values)
    limit = codec.norm_bound(raw, num_values)
    if not torch.isfinite(decoded).all():
        assert not limit < 3e38
    else:
        assert not float(torch.linalg.vector_norm(decoded.double())) > limit * (1 + 1e-5)
