from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.inner import InnerConfig, InnerLoop, smooth
from diloco.model import ModelSize, build_model, next_byte_loss
from service.errors import InputError

TINY = ModelSize(num_layers=1, num_heads=2, width=16, context=8)
TOKENS = torch.arange(18).view(2, 9)


def test_smoothing_starts_at_the_first_value() -> None:
    assert smooth(None, 3.0) == 3.0
    assert smooth(2.0, 4.0) == pytest.approx(2.1)


def test_training_on_one_batch_lowers_its_loss() -> None:
    inner = InnerLoop(build_model(TINY, seed=0), InnerConfig(warmup_steps=0, lr=1e-2))
    inner.take_step(TOKENS)
    before = inner.loss
    for _ in range(30):
        inner.take_step(TOKENS)
    assert before is not None
    assert inner.loss is not None
    assert inner.loss < before - 1.0
    assert inner.step == 31


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    module = build_model(TINY, seed=0)
    inner = InnerLoop(module, InnerConfig())
    inner.take_step(TOKENS)
    before = [p.clone() for p in module.parameters()]
    loss = inner.loss
    module.norm.bias.register_hook(lambda grad: grad * float("nan"))  # type: ignore[no-untyped-call]
    assert not inner.take_step(TOKENS)
    assert (inner.step, inner.skipped, inner.loss) == (2, 1, loss)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def squared_error(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (module(batch) - 1.0).square().mean()
    return loss


def test_any_loss_is_trained_on_and_clipped() -> None:
    module = nn.Linear(2, 1)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)  # so small a difference between larger numbers would be rounded
    inner = InnerLoop(
        module,
        InnerConfig(clip_norm=1e-3),
        loss=squared_error,
        optimizer=torch.optim.SGD([*module.parameters()], lr=1.0),
    )
    before = [p.clone() for p in module.parameters()]
    assert inner.take_step(torch.full((4, 2), 100.0))
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, module.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3 / 50, rel=1e-3)  # of 50 warm-up steps this is the first


def test_the_rates_of_an_own_optimizer_are_the_peaks_of_its_groups() -> None:
    module = nn.Linear(2, 1)
    groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    inner = InnerLoop(module, InnerConfig(warmup_steps=2), loss=squared_error, optimizer=optimizer)
    rates = []
    for _ in range(3):
        inner.take_step(torch.ones(4, 2))
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[0.05, 0.2], [0.1, 0.4], [0.1, 0.4]]


def test_a_decay_leaves_each_group_the_same_share_of_its_peak() -> None:
    module = nn.Linear(2, 1)
    groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    config = InnerConfig(lr=1.0, warmup_steps=1, lr_schedule="linear", decay_steps=3, min_lr=0.5)
    inner = InnerLoop(module, config, loss=squared_error, optimizer=optimizer)
    rates = []
    for _ in range(4):
        inner.take_step(torch.ones(4, 2))
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [pytest.approx([0.1 * share, 0.4 * share]) for share in (1.0, 0.75, 0.5, 0.5)]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: (m(b) - 1).square(), r"the loss is a tensor of shape \[4, 1\], not a scalar tensor"),
        (lambda m, b: m(b).mean().item(), "the loss is a float"),
        (lambda m, b: None, "the loss is a NoneType"),
        (lambda m, b: m(b).mean().detach(), "the loss has no gradient"),
    ],
)
def test_what_is_no_loss_is_told(loss: Callable[[nn.Module, torch.Tensor], Any], message: str) -> None:
    inner = InnerLoop(nn.Linear(2, 1), InnerConfig(), loss=loss)
    with pytest.raises(InputError, match=message) as caught:
        inner.take_step(torch.ones(4, 2))
    assert caught.value.field == "workload"


def test_frozen_parameters_stay_and_a_nan_of_any_model_is_skipped() -> None:
    first = nn.Linear(2, 3).requires_grad_(False)
    module = nn.Sequential(first, nn.BatchNorm1d(3), nn.Linear(3, 1))
    frozen = first.weight.clone()
    inner = InnerLoop(module, InnerConfig(warmup_steps=0), loss=squared_error)
    assert inner.take_step(torch.rand(4, 2))
    trained = [p.clone() for p in module.parameters()]
    assert not inner.take_step(torch.full((4, 2), float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(trained, module.parameters(), strict=True))
    assert torch.equal(first.weight, frozen)
    assert inner.skipped == 1


def accumulated(*, config: InnerConfig, splits: list[int], steps: int = 4) -> nn.Module:
    """A byte GPT trained on the same sequences in batches of the given sizes."""
    module = build_model(TINY, seed=0)
    inner = InnerLoop(module, config, loss=next_byte_loss)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batches = torch.randint(256, (sum(splits), 9), generator=generator).split_with_sizes(splits)
        assert inner.take_step(*batches, tokens=[batch[:, 1:].numel() for batch in batches])
    return module


@pytest.mark.parametrize("splits", [[2, 2, 2, 2], [5, 1, 2]])
@pytest.mark.parametrize("clip_norm", [1e9, 1e-2])
def test_gradients_of_small_batches_add_up_to_those_of_the_large_one(splits: list[int], clip_norm: float) -> None:
    config = InnerConfig(warmup_steps=0, clip_norm=clip_norm)
    whole, split = (accumulated(config=config, splits=each) for each in ([8], splits))
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_batches_that_do_not_count_the_same_would_be_another_step() -> None:
    def trained(tokens: list[int]) -> torch.Tensor:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        config = InnerConfig(warmup_steps=0, clip_norm=1e9)
        optimizer = torch.optim.SGD([*module.parameters()], lr=1.0)
        inner = InnerLoop(module, config, loss=squared_error, optimizer=optimizer)
        inner.take_step(torch.ones(3, 1), torch.zeros(1, 1), tokens=tokens)
        return module.weight.detach()

    # The gradient is -2 where the input is 1, and 0 where it is 0.
    assert trained([3, 1]).item() == pytest.approx(1.5)
    assert trained([]).item() == pytest.approx(1.0)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_one_batch_that_is_not_finite_skips_the_whole_step(spoilt: int) -> None:
    module = nn.Linear(2, 1)
    inner = InnerLoop(module, InnerConfig(), loss=squared_error)
    before = [p.clone() for p in module.parameters()]
    batches = [torch.full((4, 2), float("nan") if index == spoilt else 1.0) for index in range(3)]
    assert not inner.take_step(*batches)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert (inner.step, inner.skipped, inner.loss) == (1, 1, None)
    assert inner.take_step(*batches[:spoilt], *batches[spoilt + 1 :])


def test_a_safepoint_after_each_batch_may_give_the_step_up_without_a_trace() -> None:
    calls: list[int] = []

    def interrupt() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise InterruptedError

    modules = [build_model(TINY, seed=0) for _ in range(2)]
    straight = InnerLoop(modules[0], InnerConfig())
    disturbed = InnerLoop(modules[1], InnerConfig(), safepoint=interrupt)
    batches = [TOKENS, TOKENS + 1, TOKENS + 2]
    with pytest.raises(InterruptedError):
        disturbed.take_step(*batches)
    assert disturbed.step == 0
    assert disturbed.take_step(*batches)
    assert straight.take_step(*batches)
    assert len(calls) == 2 + 3
    assert all(torch.equal(a, b) for a, b in zip(*(module.parameters() for module in modules), strict=True))
