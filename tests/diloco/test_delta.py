"""Deltas of global parameters: both ends come to the same bits, and nothing is lost for good."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.codec import CHUNK, CODECS, Codec
from diloco.delta import apply_chain, chain_bytes, encode_delta, parse_chain
from service.errors import InputError

SIZE = 301
lossy = pytest.mark.parametrize("codec", [CODECS["bf16"], CODECS["int8"], CODECS["int4"]], ids=["bf16", "int8", "int4"])


def vector(seed: int, *, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int32)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1, 64, SIZE, CHUNK + 65])
@pytest.mark.parametrize("alpha", [1.0, -1.0])
def test_accumulating_is_adding_what_was_decoded(codec: Codec, size: int, alpha: float) -> None:
    payload = codec.encode(1e-2 * vector(1, size=size)).clone()
    expected = vector(2, size=size).add_(codec.decode(payload, size), alpha=alpha)
    assert torch.equal(bits(codec.accumulate(payload, vector(2, size=size), alpha=alpha)), bits(expected))


@lossy
def test_a_chain_of_deltas_leads_to_the_published_parameters_bit_for_bit(codec: Codec) -> None:
    published = start = vector(0)
    payloads = []
    for number in range(1, 4):
        payload, published = encode_delta(codec, start + 0.01 * vector(number), published)
        payloads.append(payload)
    island = start.clone()
    codecs = (codec.name,) * len(payloads)
    assert sum(payload.numel() for payload in payloads) == chain_bytes(codecs, SIZE)
    apply_chain(torch.cat(payloads), codecs, island)
    assert torch.equal(bits(island), bits(published))


@lossy
def test_published_parameters_come_to_exact_ones_that_stand_still(codec: Codec) -> None:
    exact, published = vector(1), vector(0)
    distances = []
    for _ in range(6):
        published = encode_delta(codec, exact, published)[1]
        distances.append(float((exact - published).norm()))
    assert distances[0] < 0.2 * float((exact - vector(0)).norm())
    assert distances[-1] < 1e-4 * distances[0] + 1e-6


def test_a_way_that_is_not_finite_is_refused() -> None:
    exact = vector(1)
    exact[7] = float("inf")
    with pytest.raises(InputError, match="value 7 is inf"):
        encode_delta(CODECS["int4"], exact, vector(0))


def test_an_answer_names_its_codecs_or_is_the_parameters() -> None:
    assert parse_chain("") == ()
    assert parse_chain("int4, bf16") == ("int4", "bf16")
    with pytest.raises(InputError, match="'int3' is none of"):
        parse_chain("int3")
