"""What goes into a step: stale contributions by their weight, and none that would make it overflow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.outer import Contribution, OuterOptimizer
from diloco.schema import Manifest, TensorSpec
from diloco.synchronizer.contribution import accept_contribution, begin_contribution
from diloco.synchronizer.generation import Generation, Outcome, write_generation
from diloco.synchronizer.rounds import Claim, staleness_weight
from diloco.synchronizer.step import NonFiniteStepError, Share, StepPlan, finite_proposal, take_step
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import Chunk
from tests.diloco import reference
from tests.diloco.reference import Vector

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


LR, MU, SIZE = 0.7, 0.9, 500
EXPONENT = 0.5
MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(SIZE,), dtype="float32"),))


def vector(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def write(directory: Path, version: int, parameters: Tensor, momentum: Tensor) -> Generation:
    outcome = Outcome(outer_lr=LR, outer_momentum=MU)
    return write_generation(directory, version, MANIFEST, parameters, momentum, outcome=outcome)


def share(directory: Path, base: Generation, local: Tensor, *, slot: int, tokens: int, into: int) -> Share:
    """A contribution on disk, as the synchronizer has it when the round closes."""
    data = bytes(wire_bytes(local))
    claim = Claim(round=base.version, slot=slot, epoch=0, tokens=tokens)
    chunk = Chunk(start=0, total=len(data), digest=sha256(data), data=data)
    upload = begin_contribution(directory, claim, chunk)
    upload.append(chunk)
    accepted = accept_contribution(directory, claim, upload, into=into)
    weight = staleness_weight(accepted.staleness, exponent=EXPONENT)
    return Share(accepted=accepted, base=base, weight=weight)


def wide(tensor: Tensor) -> Vector:
    return tensor.numpy().astype(np.float64)


@pytest.mark.parametrize("staleness", [(0, 0), (0, 1), (2, 0), (3, 3), (1,)])
def test_stale_steps_follow_the_reference(tmp_path: Path, staleness: tuple[int, ...]) -> None:
    momentum = vector(99)
    generations = [write(tmp_path, version, vector(version), momentum) for version in range(4)]
    current = generations[-1]
    outer = OuterOptimizer(vector(current.version), momentum.clone(), lr=LR, mu=MU)
    locals_ = {slot: vector(100 + slot) for slot in range(len(staleness))}
    bases = {slot: generations[current.version - s] for slot, s in enumerate(staleness)}
    tokens = {slot: 7 + 100 * slot for slot in locals_}
    shares = {
        slot: share(tmp_path, bases[slot], local, slot=slot, tokens=tokens[slot], into=current.version)
        for slot, local in locals_.items()
    }
    step = take_step(Disk(tmp_path), outer, StepPlan(base=current, shares=shares, epochs={}))
    outer.commit()
    expected = reference.Outer(parameters=wide(vector(current.version)), momentum=wide(momentum), lr=LR, mu=MU)
    terms = [
        reference.Term(
            pseudo_gradient=wide(vector(bases[slot].version)) - wide(local),
            tokens=tokens[slot],
            staleness=staleness[slot],
        )
        for slot, local in locals_.items()
    ]
    expected.step(reference.mean_pseudo_gradient(terms, exponent=EXPONENT))
    np.testing.assert_allclose(outer.parameters.numpy(), expected.parameters, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outer.momentum.numpy(), expected.momentum, rtol=1e-5, atol=1e-5)
    assert step.stale == tuple(slot for slot, s in enumerate(staleness) if s)
    assert step.generation.outcome.applied.keys() == locals_.keys()


def test_a_step_in_which_nothing_is_stale_is_the_synchronous_one_bit_for_bit(tmp_path: Path) -> None:
    base = write(tmp_path, 0, vector(0), torch.zeros(SIZE))
    locals_ = {slot: vector(slot + 1) for slot in range(3)}
    shares = {slot: share(tmp_path, base, local, slot=slot, tokens=slot + 5, into=0) for slot, local in locals_.items()}
    outer = OuterOptimizer(vector(0), torch.zeros(SIZE), lr=LR, mu=MU)
    take_step(Disk(tmp_path), outer, StepPlan(base=base, shares=shares, epochs={}))
    outer.commit()
    plain = OuterOptimizer(vector(0), torch.zeros(SIZE), lr=LR, mu=MU)
    plain.propose({slot: Contribution(local=local, tokens=slot + 5) for slot, local in locals_.items()})
    plain.commit()
    assert torch.equal(outer.parameters, plain.parameters)
    assert torch.equal(outer.momentum, plain.momentum)
