"""One outer step as a unit of work for a thread: contributions in, the next generation on disk out.

With t[i] the tokens, w(s[i]) the staleness weight (`rounds.staleness_weight`) and d[i] = b[i] - l[i] the
pseudo-gradient of contribution i against the parameters b[i] that its island started from, the step is that of
`diloco.outer` on

    delta = sum(t[i] * w(s[i]) * d[i]) / sum(t[i])

which is its mean when nothing is stale. Like in buffered asynchronous aggregation (arXiv 2106.06639) the sum below has
no w: what staleness takes from a contribution is not given to the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Self

import torch
from torch import Tensor

from diloco.codec import CODECS, Codec
from diloco.delta import encode_delta
from diloco.outer import BLOCK, Contributed, OuterOptimizer, Proposal
from diloco.stages import STAGES, Stage
from diloco.synchronizer.contribution import Accepted
from diloco.synchronizer.generation import Encoded, Generation, Outcome, write_generation
from diloco.synchronizer.grace import Arrivals
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import distance_between, require_finite
from service.errors import InputError


class NonFiniteStepError(InputError):
    """Finite contributions whose outer step overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A contribution as it goes into a step."""

    accepted: Accepted
    base: Generation
    """The global parameters, as published, that it was computed against."""
    weight: float
    """Against a fresh one of as many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A share in the place where its pseudo-gradient puts it against the current global parameters.

    With g the current exact parameters, b the published ones that the island started from, l its local ones, d = b - l
    and w the weight, that is g - w * d. A fresh contribution that carries l is l itself, mapped from its file, where
    what is published is exact; every other one is computed when it is asked for, a block at a time, so that a step
    needs no memory for them.
    """

    share: Share
    current: Tensor  # (parameters,) fp32
    payload: Tensor  # (bytes,) uint8
    base: Tensor | None  # (parameters,) fp32

    @classmethod
    def of(cls, share: Share, current: Tensor) -> Self:
        """The share against these parameters, its payload mapped from its file."""
        accepted = share.accepted
        is_there = not accepted.codec.carries_parameters or (accepted.staleness == 0 and share.base.delta is None)
        base = None if is_there else share.base.parameters()
        return cls(share=share, current=current, payload=accepted.payload(), base=base)

    @property
    def tokens(self) -> int:
        return self.share.accepted.claim.tokens

    def part(self, start: int, room: Tensor) -> Tensor:
        codec, weight = self.share.accepted.codec, self.share.weight
        stop = start + room.numel()
        vector = codec.decode_part(self.payload, self.current.numel(), start, room)
        if not codec.carries_parameters:
            return vector.mul_(-weight).add_(self.current[start:stop])
        if self.base is None:
            return vector
        return torch.sub(vector, self.base[start:stop], out=room).mul_(weight).add_(self.current[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What goes into one outer step, and what the generation remembers beside its parameters."""

    base: Generation
    shares: Mapping[int, Share]
    epochs: Mapping[int, int]
    arrivals: tuple[Arrivals, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an outer step made."""

    generation: Generation
    pseudo_gradient_norm: float
    residual_norm: float
    """L2 norm of what the published parameters lack of the exact ones."""
    tokens: int
    dropped: tuple[int, ...]
    """Slots whose contributions were left out, as the step overflowed with them."""
    stale: tuple[int, ...]
    """Slots whose contributions were against older parameters."""


def take_step(disk: Disk, outer: OuterOptimizer, plan: StepPlan, *, pull_codec: Codec = CODECS["fp32"]) -> Step:
    """Compute the step and write the generation. The optimizer's state is as before until the caller commits it.

    The new parameters are published as ``pull_codec`` lets them travel.

    Raises:
        NonFiniteStepError: the result holds NaN or infinity.
        UnavailableError: it cannot be written now.
    """
    accepted = {slot: share.accepted for slot, share in plan.shares.items()}
    with STAGES.of(Stage.MERGE):
        contributions = {slot: Placed.of(share, outer.parameters) for slot, share in plan.shares.items()}
        proposal, slots = finite_proposal(outer, contributions)
    applied = {slot: accepted[slot].applied for slot in slots}
    outcome = Outcome(
        run=plan.base.run,
        applied={slot: one.digest for slot, one in applied.items()},
        last={**plan.base.outcome.last, **applied},
        epochs=plan.epochs,
        arrivals=plan.arrivals,
        outer_lr=outer.lr,
        outer_momentum=outer.mu,
        delay=proposal.delay,
    )
    base = plan.base
    with STAGES.of(Stage.ENCODE):
        parameters, encoded = _published(pull_codec, proposal.parameters, base)
    with disk.writing():
        generation = write_generation(
            disk.directory,
            base.version + 1,
            base.manifest,
            parameters,
            proposal.momentum,
            outcome=outcome,
            encoded=encoded,
            buffer=proposal.buffer,
        )
    return Step(
        generation=generation,
        pseudo_gradient_norm=proposal.pseudo_gradient_norm,
        residual_norm=0.0 if encoded is None else distance_between(proposal.parameters, parameters),
        tokens=sum(contributions[slot].tokens for slot in slots),
        dropped=tuple(sorted(contributions.keys() - set(slots))),
        stale=tuple(slot for slot in slots if accepted[slot].staleness),
    )


def _published(codec: Codec, exact: Tensor, base: Generation) -> tuple[Tensor, Encoded | None]:
    """The parameters that islands will hold, and how they get there from ``base``.

    Raises:
        NonFiniteStepError: there is no way that can be encoded.
    """
    if codec.carries_parameters:
        return exact, None
    try:
        payload, parameters = encode_delta(codec, exact, base.parameters())
        require_finite(parameters)
    except InputError as exc:
        raise NonFiniteStepError(f"outer step cannot be encoded: {exc.message}", field="contributions") from exc
    return parameters, Encoded(exact=exact, codec=codec.name, payload=payload)


def finite_proposal(
    outer: OuterOptimizer, contributions: Mapping[int, Contributed]
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
            if proposal.buffer is not None:
                require_finite(proposal.buffer)
        except InputError as exc:
            if len(slots) == len(contributions):
                farthest_last.sort(key=lambda slot: _distance(contributions[slot], outer))
            farthest_last.pop()
            if not farthest_last:
                raise NonFiniteStepError(f"outer step overflows: {exc.message}", field="contributions") from exc
        else:
            return proposal, slots


def _distance(contribution: Contributed, outer: OuterOptimizer) -> float:
    distances = []
    room = torch.empty(BLOCK)
    for start, current in zip(count(0, BLOCK), torch.split(outer.parameters, BLOCK), strict=False):
        local = contribution.part(start, room[: current.numel()])
        distances.append(float(torch.linalg.vector_norm(local - current)))
    distance = math.hypot(*distances)
    return math.inf if math.isnan(distance) else distance
