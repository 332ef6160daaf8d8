"""One outer step as a unit of work for a thread: contributions in, the next generation on disk out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.outer import Contribution, OuterOptimizer, Proposal
from diloco.synchronizer.contribution import Accepted
from diloco.synchronizer.generation import Generation, Outcome, write_generation
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import distance_between, require_finite
from service.errors import InputError


class NonFiniteStepError(InputError):
    """Finite contributions whose outer step overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an outer step made."""

    generation: Generation
    pseudo_gradient_norm: float
    tokens: int
    dropped: tuple[int, ...]
    """Slots whose contributions were left out, as the step overflowed with them."""


def take_step(
    disk: Disk,
    outer: OuterOptimizer,
    base: Generation,
    accepted: Mapping[int, Accepted],
    epochs: Mapping[int, int],
) -> Step:
    """Compute the step and write the generation. The optimizer's state is as before until the caller commits it.

    Raises:
        NonFiniteStepError: the result holds NaN or infinity.
        UnavailableError: it cannot be written now.
    """
    contributions = {slot: Contribution(local=a.local(), tokens=a.claim.tokens) for slot, a in accepted.items()}
    proposal, slots = finite_proposal(outer, contributions)
    outcome = Outcome(
        applied={slot: accepted[slot].digest.hex() for slot in slots},
        epochs=epochs,
        outer_lr=outer.lr,
        outer_momentum=outer.mu,
    )
    with disk.writing():
        generation = write_generation(
            disk.directory, base.version + 1, base.manifest, proposal.parameters, proposal.momentum, outcome=outcome
        )
    return Step(
        generation=generation,
        pseudo_gradient_norm=proposal.pseudo_gradient_norm,
        tokens=sum(contributions[slot].tokens for slot in slots),
        dropped=tuple(sorted(contributions.keys() - set(slots))),
    )


def finite_proposal(
    outer: OuterOptimizer, contributions: Mapping[int, Contribution]
) -> tuple[Proposal, tuple[int, ...]]:
    """The outer step and the slots in it: all, or without the farthest from the global parameters if it overflows.

    Raises:
        NonFiniteStepError: it overflows with each of them.
    """
    farthest_last = sorted(contributions)
    while True:
        slots = tuple(sorted(farthest_last))
        proposal = outer.propose({slot: contributions[slot] for slot in slots})
        try:
            require_finite(proposal.parameters)
            require_finite(proposal.momentum)
        except InputError as exc:
            if len(slots) == len(contributions):
                farthest_last.sort(key=lambda slot: _distance(contributions[slot], outer))
            farthest_last.pop()
            if not farthest_last:
                raise NonFiniteStepError(f"outer step overflows: {exc.message}", field="contributions") from exc
        else:
            return proposal, slots


def _distance(contribution: Contribution, outer: OuterOptimizer) -> float:
    distance = distance_between(contribution.local, outer.parameters)
    return math.inf if math.isnan(distance) else distance
