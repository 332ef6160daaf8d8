"""Vectors and parameters through two buffers in turn. On a CPU the buffers are plain, the way is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.pinned import download, fills, shift, upload

SIZES = (5, 0, 1, 12, 7, 3)
CAPACITIES = (1, 2, 5, 7, 28, 100)

devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)
capacities = pytest.mark.parametrize("capacity", CAPACITIES)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 30))
def test_buffers_are_filled_to_the_brim_and_nothing_is_left_out(sizes: list[int], capacity: int) -> None:
    found = list(fills(sizes, capacity))
    assert all(sum(piece.size for piece in fill) == capacity for fill in found[:-1])
    assert all(0 < sum(piece.size for piece in fill) <= capacity for fill in found)
    seen: list[list[int]] = [[] for _ in sizes]
    for fill in found:
        at = 0
        for piece in fill:
            assert piece.at == at
            at += piece.size
            seen[piece.index].extend(range(piece.start, piece.stop))
    assert seen == [list(range(size)) for size in sizes]


def vector(seed: int) -> Tensor:
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed))


def parts(flat: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(flat, list(SIZES)))


@devices
@capacities
def test_what_goes_there_comes_back_bit_for_bit(device: str, capacity: int) -> None:
    source, back = vector(0), torch.zeros(sum(SIZES))
    parameters = [torch.zeros(size, device=device) for size in SIZES]
    upload(list(zip(parts(source), parameters, strict=True)), capacity=capacity)
    assert torch.equal(torch.cat(parameters).cpu(), source)
    download(list(zip(parts(back), parameters, strict=True)), capacity=capacity)
    assert torch.equal(back, source)


@devices
@capacities
def test_a_shift_has_the_bits_of_one_on_the_cpu(device: str, capacity: int) -> None:
    local, base, to = vector(0), vector(1), vector(2)
    expected = (local - base) + to
    parameters = [part.clone().to(device) for part in parts(local)]
    shift(list(zip(parts(base), parts(to), parameters, strict=True)), capacity=capacity)
    assert torch.equal(torch.cat(parameters).cpu(), expected)


def test_nothing_to_copy_is_nothing_to_do() -> None:
    for call in (download, upload, shift):
        call([])
