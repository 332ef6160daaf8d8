from __future__ import annotations

import pytest
import torch

from diloco.inner import InnerConfig, InnerLoop, smooth, warmup_lr
from diloco.model import ModelSize, build_model

TINY = ModelSize(num_layers=1, num_heads=2, width=16, context=8)
TOKENS = torch.arange(18).view(2, 9)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (10_000, 1.0)])
def test_learning_rate_rises_linearly_to_its_peak(step: int, expected: float) -> None:
    assert warmup_lr(step, InnerConfig(lr=1.0, warmup_steps=10)) == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    assert warmup_lr(0, InnerConfig(lr=0.5, warmup_steps=0)) == 0.5


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
