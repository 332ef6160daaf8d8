from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diloco.activation_checkpointing import checkpoint_activations
from diloco.byte_text import ByteText
from diloco.inner import InnerConfig, InnerLoop
from diloco.model import ModelSize, build_model, next_byte_loss
from diloco.precision import Precision
from diloco.safepoint import YieldInterrupted, hooked, layers_of
from diloco.workload_loading import build_checkpointed_module, build_module
from examples.own_model.spirals import Spirals
from service.errors import InputError

SIZE = ModelSize(num_layers=3, num_heads=2, width=32, context=16)
TOKENS = torch.randint(256, (2, SIZE.context + 1), generator=torch.Generator().manual_seed(0))


def byte_text() -> ByteText:
    return ByteText(SIZE, data=[Path(__file__)], batch_size=1)


def gradients(module: nn.Module) -> tuple[list[Tensor], int]:
    """Of one step, with the bytes that are kept for the backward pass."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = next_byte_loss(module, TOKENS)
    loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None], kept


def test_gradients_are_the_same_and_less_is_kept() -> None:
    plain, saved = build_module(byte_text(), seed=0), build_checkpointed_module(byte_text(), seed=0)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in saved.named_parameters()]
    (expected, all_bytes), (actual, some_bytes) = gradients(plain), gradients(saved)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert some_bytes < all_bytes / 2


def test_dropout_is_drawn_again_as_it_was() -> None:
    def loss(*, saved: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        if saved:
            checkpoint_activations([layer])
        layer(torch.ones(4, 8)).square().mean().backward()
        gradient = layer.get_parameter("0.weight").grad
        assert gradient is not None
        return gradient

    assert torch.equal(loss(saved=False), loss(saved=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_goes_with_autocast_and_accumulation(precision: Precision) -> None:
    modules = [build_module(byte_text(), seed=0), build_checkpointed_module(byte_text(), seed=0)]
    for module in modules:
        inner = InnerLoop(module, InnerConfig(warmup_steps=0, precision=precision))
        for _ in range(3):
            assert inner.take_step(TOKENS, TOKENS.flip(0))
    assert all(torch.equal(a, b) for a, b in zip(*(module.parameters() for module in modules), strict=True))


@pytest.mark.parametrize("interrupted_at", [1, 5, 14, 15, 20, 30])
def test_a_step_given_up_while_it_computes_again_leaves_no_trace(interrupted_at: int) -> None:
    passed = 0

    def interrupt() -> None:
        nonlocal passed
        passed += 1
        if passed == interrupted_at:
            raise YieldInterrupted

    plain = build_model(SIZE, seed=0)
    assert InnerLoop(plain, InnerConfig()).take_step(TOKENS)
    saved = build_checkpointed_module(byte_text(), seed=0)
    inner = InnerLoop(saved, InnerConfig(), safepoint=interrupt)
    with hooked(layers_of(saved), interrupt):
        with pytest.raises(YieldInterrupted):
            inner.take_step(TOKENS)
        assert inner.take_step(TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), saved.parameters(), strict=True))


class Layered(Spirals):
    def checkpointed_layers(self, model: nn.Module) -> Iterable[nn.Module]:
        return [model.get_submodule("0")]


def test_an_own_workload_names_its_layers_or_is_refused() -> None:
    assert build_checkpointed_module(Layered(width=4, batch_size=2, num_samples=64), seed=0)
    with pytest.raises(InputError, match="checkpointed_layers names no layers") as caught:
        build_checkpointed_module(Spirals(width=4, batch_size=2, num_samples=64), seed=0)
    assert caught.value.field == "workload"
