"""The outer step against a NumPy reference and against PyTorch's Nesterov."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diloco.outer import BLOCK, Contribution, OuterOptimizer
from tests.diloco import reference
from tests.diloco.reference import Vector

LR, MU, SIZE = 0.7, 0.9, 1000


def vector(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def wide(tensor: torch.Tensor) -> Vector:
    return tensor.numpy().astype(np.float64)


def optimizer(*, lr: float = LR, mu: float = MU) -> OuterOptimizer:
    return OuterOptimizer(vector(0), torch.zeros(SIZE), lr=lr, mu=mu)


def rounds_of(num_islands: int, num_rounds: int = 5) -> list[dict[int, Contribution]]:
    return [
        {
            slot: Contribution(local=vector(100 * number + slot + 1), tokens=100 * slot + 7)
            for slot in range(num_islands)
        }
        for number in range(num_rounds)
    ]


@pytest.mark.parametrize("num_islands", [1, 2, 5])
def test_steps_follow_the_reference(num_islands: int) -> None:
    outer = optimizer()
    expected = reference.Outer(parameters=wide(outer.parameters), momentum=np.zeros(SIZE), lr=LR, mu=MU)
    for round_ in rounds_of(num_islands):
        outer.propose(round_)
        outer.commit()
        terms = [
            reference.Term(pseudo_gradient=expected.parameters - wide(given.local), tokens=given.tokens)
            for given in round_.values()
        ]
        expected.step(reference.mean_pseudo_gradient(terms))
        np.testing.assert_allclose(outer.parameters.numpy(), expected.parameters, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(outer.momentum.numpy(), expected.momentum, rtol=1e-5, atol=1e-5)


def test_steps_follow_torch_sgd_with_nesterov() -> None:
    outer = optimizer()
    parameter = torch.nn.Parameter(outer.parameters.clone())
    sgd = torch.optim.SGD([parameter], lr=LR, momentum=MU, nesterov=True)
    for round_ in rounds_of(1):
        outer.propose(round_)
        outer.commit()
        parameter.grad = parameter.detach() - round_[0].local
        sgd.step()
        torch.testing.assert_close(outer.parameters, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_one_island_with_lr_1_and_no_momentum_is_adopted_bit_for_bit() -> None:
    outer = optimizer(lr=1.0, mu=0.0)
    local = vector(1) * torch.logspace(-30, 10, SIZE)
    proposal = outer.propose({3: Contribution(local=local, tokens=11)})
    assert torch.equal(proposal.parameters, local)


def test_the_result_does_not_depend_on_the_order_of_arrival() -> None:
    round_ = rounds_of(5)[0]
    forward = optimizer().propose(round_)
    backward = optimizer().propose(dict(reversed(round_.items())))
    assert torch.equal(forward.parameters, backward.parameters)
    assert torch.equal(forward.momentum, backward.momentum)


def test_islands_that_did_not_move_leave_the_parameters_unchanged() -> None:
    outer = optimizer()
    before = outer.parameters.clone()
    proposal = outer.propose({s: Contribution(local=before.clone(), tokens=s + 1) for s in range(3)})
    assert torch.equal(proposal.parameters, before)
    assert not proposal.momentum.any()
    assert proposal.pseudo_gradient_norm == 0


def test_a_proposal_that_is_not_committed_changes_nothing() -> None:
    outer = optimizer()
    before = outer.parameters.clone()
    first = outer.propose(rounds_of(2)[0]).parameters.clone()
    assert torch.equal(outer.parameters, before)
    again = outer.propose(rounds_of(2)[0])
    assert torch.equal(again.parameters, first)
    outer.commit()
    assert torch.equal(outer.parameters, first)


@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("size", [1, BLOCK, 2 * BLOCK + 77])
def test_a_step_block_by_block_is_the_step_in_one_piece_bit_for_bit(size: int, num_islands: int) -> None:
    generator = torch.Generator().manual_seed(size)
    before, velocity, *locals_ = (torch.randn(size, generator=generator) for _ in range(2 + num_islands))
    tokens = [7 + 100 * slot for slot in range(num_islands)]
    outer = OuterOptimizer(before.clone(), velocity.clone(), lr=LR, mu=MU)
    given = zip(locals_, tokens, strict=True)
    proposal = outer.propose({slot: Contribution(local=one, tokens=n) for slot, (one, n) in enumerate(given)})
    mean = locals_[0].clone()
    for local, count in zip(locals_[1:], tokens[1:], strict=True):
        mean.add_(local - locals_[0], alpha=count / sum(tokens))
    delta = before - mean
    momentum = delta.add(velocity, alpha=MU)
    assert torch.equal(proposal.momentum, momentum)
    assert torch.equal(proposal.parameters, mean.add(delta, alpha=1.0 - LR).sub(momentum, alpha=LR * MU))
    assert proposal.pseudo_gradient_norm == pytest.approx(float(torch.linalg.vector_norm(delta)), rel=1e-5)
