"""Modules to flat vectors and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.fragment import (
    first_difference,
    flatten,
    flatten_module,
    manifest_of,
    num_bytes,
    shift_module,
    trainable,
    unflatten_into,
    wire_bytes,
)
from diloco.schema import Manifest, TensorSpec
from service.errors import InputError


class Model(nn.Module):
    """Tied, frozen, half-precision and empty parameters, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("steps", torch.zeros(2))


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def test_the_manifest_has_trainable_parameters_once_sorted_by_name() -> None:
    manifest = manifest_of(Model())
    assert manifest.tensors == (
        spec("embedding.weight", 5, 3),
        spec("empty", 0, 7),
        spec("narrow", 4, dtype="bfloat16"),
        spec("scalar"),
    )
    assert num_bytes(manifest) == 4 * (15 + 0 + 4 + 1)


def test_a_module_survives_the_way_there_and_back() -> None:
    source, target = Model(0), Model(1)
    frozen = target.frozen.weight.clone()
    unflatten_into(flatten_module(source), target)
    for name, parameter in trainable(source).items():
        assert torch.equal(parameter, trainable(target)[name]), name
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.frozen.weight, frozen)


def test_flatten_fills_the_buffer_that_it_is_given() -> None:
    buffer = torch.empty(20)
    assert flatten_module(Model(), out=buffer) is buffer
    assert torch.equal(buffer, flatten_module(Model()))


def test_flatten_is_fp32_and_detached() -> None:
    flat = flatten_module(Model())
    assert flat.dtype == torch.float32
    assert not flat.requires_grad


@pytest.mark.parametrize("size", [19, 21])
def test_a_vector_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"vector has {size} elements, parameters have 20"):
        unflatten_into(torch.zeros(size), Model())
    with pytest.raises(ValueError, match="elements"):
        flatten([torch.zeros(20)], out=torch.zeros(size))


def test_wire_bytes_are_little_endian_fp32_and_share_memory() -> None:
    flat = torch.tensor([1.0, -2.0])
    view = wire_bytes(flat)
    assert bytes(view) == bytes.fromhex("0000803f000000c0")
    view[:4] = bytes(4)
    assert flat[0] == 0


def test_a_module_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="no trainable parameters"):
        manifest_of(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ((spec("a", 2), spec("b", 3)), None),
        ((spec("a", 2), spec("b", 4)), "parameter 1 is b [3] float32 against b [4] float32"),
        ((spec("a", 2), spec("c", 3)), "parameter 1 is b [3] float32 against c [3] float32"),
        ((spec("a", 2),), "parameter 1 is b [3] float32 against absent"),
        (
            (spec("a", 2, dtype="bfloat16"), spec("b", 3)),
            "parameter 0 is a [2] float32 against a [2] bfloat16",
        ),
        ((spec("a", 2), spec("b", 3), spec("c")), "parameter 2 is absent against c [] float32"),
    ],
)
def test_the_first_difference_is_named(other: tuple[TensorSpec, ...], difference: str | None) -> None:
    mine = Manifest(tensors=(spec("a", 2), spec("b", 3)))
    assert first_difference(mine, Manifest(tensors=other)) == difference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_are_shifted_by_what_they_are_apart(dtype: torch.dtype) -> None:
    def random(seed: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(seed))

    module, reference = nn.Linear(5, 1).to(dtype), nn.Linear(5, 1).to(dtype)
    for each in (module, reference):
        unflatten_into(random(0), each)
    unflatten_into((flatten_module(reference) - random(1)) + random(2), reference)
    shift_module(module, base=random(1), to=random(2))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), reference.parameters(), strict=True))
    columns = nn.Linear(4, 3, bias=False)
    columns.weight = nn.Parameter(torch.zeros(4, 3).t())
    shift_module(columns, base=torch.zeros(12), to=torch.arange(12.0))
    assert torch.equal(columns.weight, torch.arange(12.0).view(3, 4))
