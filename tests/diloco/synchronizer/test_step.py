"""A step that overflows goes without the contributions that make it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.outer import Contribution, OuterOptimizer
from diloco.synchronizer.step import NonFiniteStepError, finite_proposal

HUGE = 3e38


def optimizer() -> OuterOptimizer:
    return OuterOptimizer(torch.zeros(4), torch.zeros(4), lr=0.7, mu=0.9)


def contribution(value: float, *, tokens: int = 5) -> Contribution:
    return Contribution(local=torch.full((4,), value), tokens=tokens)


def expected(*slots: int) -> Tensor:
    return optimizer().propose({slot: contribution(slot) for slot in slots}).parameters


@pytest.mark.parametrize("absurd", [{2: -HUGE}, {0: HUGE, 2: -HUGE}, {0: float("nan")}, {2: float("inf")}])
def test_only_the_contributions_that_overflow_are_left_out(absurd: dict[int, float]) -> None:
    honest = {1: contribution(1), 3: contribution(3)}
    hostile = {slot: contribution(value, tokens=10**12) for slot, value in absurd.items()}
    outer = optimizer()
    proposal, slots = finite_proposal(outer, honest | hostile | {4: contribution(4)})
    assert slots == (1, 3, 4)
    assert torch.equal(proposal.parameters, expected(1, 3, 4))


def test_a_step_that_is_finite_keeps_all() -> None:
    proposal, slots = finite_proposal(optimizer(), {slot: contribution(slot) for slot in (2, 1)})
    assert slots == (1, 2)
    assert torch.equal(proposal.parameters, expected(1, 2))


def test_a_step_without_any_finite_contribution_fails_and_changes_nothing() -> None:
    outer = optimizer()
    with pytest.raises(NonFiniteStepError, match="contributions: outer step overflows"):
        finite_proposal(outer, {0: contribution(float("inf")), 1: contribution(float("nan"))})
    assert not outer.parameters.any()
    assert not outer.momentum.any()
