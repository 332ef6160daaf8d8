"""One outer step as a unit of work for a thread: contributions in, the next generation on disk out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.outer import Contribution, OuterOptimizer
from diloco.synchronizer.contribution import Accepted
from diloco.synchronizer.generation import Generation, Outcome, write_generation
from diloco.synchronizer.storage import disk_errors
from diloco.synchronizer.upload import require_finite
from service.errors import InputError


class NonFiniteStepError(InputError):
    """Finite contributions whose outer step overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an outer step made."""

    generation: Generation
    pseudo_gradient_norm: float
    tokens: int


def take_step(
    directory: Path,
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
    proposal = outer.propose(contributions)
    try:
        require_finite(proposal.parameters)
        require_finite(proposal.momentum)
    except InputError as exc:
        raise NonFiniteStepError(f"outer step of round {base.version}: {exc.message}", field="contributions") from exc
    outcome = Outcome(
        applied={slot: a.digest.hex() for slot, a in sorted(accepted.items())},
        epochs=epochs,
        outer_lr=outer.lr,
        outer_momentum=outer.mu,
    )
    with disk_errors(directory):
        generation = write_generation(
            directory, base.version + 1, base.manifest, proposal.parameters, proposal.momentum, outcome=outcome
        )
    return Step(
        generation=generation,
        pseudo_gradient_norm=proposal.pseudo_gradient_norm,
        tokens=sum(c.tokens for c in contributions.values()),
    )
