"""When a contribution is admitted, what it weighs, and when a round closes. Pure: values in, a reason out.

A contribution against version r that comes while version v is current is s = v - r versions stale. It is taken in while
s is at most ``max_staleness`` (0: the synchronous rule, nothing stale), with the weight

    w(s) = (1 + s)^-alpha

of a fresh one of as many tokens. This is the polynomial discount of FedAsync (Xie et al., 2019, arXiv 1903.03934, with
alpha = 0.5); buffered asynchronous aggregation (Nguyen et al., 2021, arXiv 2106.06639) takes the same function.
Momentum on stale pseudo-gradients is what hurts asynchronous local SGD (Liu et al., 2024, arXiv 2401.09135), so
staleness is bounded, discounted, and off by default: a late island then keeps its progress for its next contribution.

A stale contribution rides along: it neither opens a round nor counts for a quorum, so that an outer step, which costs
the run one sync, is never taken for stale progress alone. A slot's progress against one version counts once: whoever
was merged must go on from the result, so a claim against an older version than that is late at any staleness. And while
a round is open, progress only replaces less progress: a copy of an older contribution that was on its way for long must
not take the place of a newer one, of which the island knows that it is in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from diloco.schema import CodecName


class Refusal(StrEnum):
    """Why a contribution is not for the open round."""

    LATE = "late"
    """Its round has closed, longer ago than staleness is allowed."""
    MERGED = "merged"
    """Its slot's progress from that version is in the global parameters already, or newer is in the open round."""
    EARLY = "early"
    """Its round has not opened: the island is ahead of a synchronizer that went back to an older generation."""
    OTHER_RUN = "other_run"
    """It is for a run that was here before, or is elsewhere."""
    FENCED = "fenced"
    """A newer epoch of the slot has contributed."""


class Close(StrEnum):
    """Why a round closes."""

    QUORUM = "quorum"
    """The quorum is in, and nobody is awaited."""
    GRACE = "grace"
    """The quorum is in, and the grace for those who are awaited is over."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """What the settings say of every round."""

    quorum: int
    timeout_s: float
    grace_min_s: float = 0.0
    grace_max_s: float = 0.0
    max_staleness: int = 0
    staleness_exponent: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a contribution says of itself."""

    round: int
    slot: int
    epoch: int
    tokens: int
    codec: CodecName = "fp32"
    run: str | None = field(default=None, compare=False)
    """Identity of the run that it is for; None where nobody said."""
    quorum: int | None = field(default=None, compare=False)
    """How many contributions the round was directed to wait for; None leaves it to the settings."""
    expected: int | None = field(default=None, compare=False)
    """To how many islands the round was directed; None when nobody directed it."""
    closes_in_s: float | None = field(default=None, compare=False)
    """Time that the round has left, as whoever waits for it was told; None leaves it to the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the run and the claim's slot stand."""

    version: int
    newest_epoch: int
    run: str | None = None
    """Identity; None: any."""
    max_staleness: int = 0
    merged_version: int = 0
    """Version below which the slot's progress is merged already, or newer progress of it is in the open round; 0 when
    neither is."""
    same_round_tokens: int = 0
    """Of what the slot has in the open round in the same epoch and against the same version as the claim."""


def refusal(claim: Claim, standing: Standing) -> Refusal | None:
    """Why the claim cannot enter the round that is open; None when it can."""
    if claim.run is not None and standing.run is not None and claim.run != standing.run:
        return Refusal.OTHER_RUN
    if claim.epoch < standing.newest_epoch:
        return Refusal.FENCED
    if claim.round > standing.version:
        return Refusal.EARLY
    if claim.round < standing.version - standing.max_staleness:
        return Refusal.LATE
    is_older = claim.round < standing.merged_version or claim.tokens < standing.same_round_tokens
    return Refusal.MERGED if is_older else None


def staleness_weight(staleness: int, *, exponent: float) -> float:
    """What a contribution so many versions behind weighs against a fresh one of as many tokens."""
    return float((1.0 + staleness) ** -exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Who is in the open round, and until when it waits for others."""

    num_fresh: int
    quorum: int
    awaits_others: bool = False
    """Whether islands are known that could still come."""
    grace_until_s: float | None = None
    """None while the quorum is not in."""
    closes_at_s: float | None = None
    """None while nobody is."""


def close_reason(attendance: Attendance, now_s: float) -> Close | None:
    """Why the round closes now; None while it stays open, as it does while nobody came."""
    if attendance.num_fresh == 0:
        return None
    if attendance.num_fresh >= attendance.quorum:
        if not attendance.awaits_others:
            return Close.QUORUM
        if attendance.grace_until_s is not None and now_s >= attendance.grace_until_s:
            return Close.GRACE
    return Close.TIMEOUT if attendance.closes_at_s is not None and now_s >= attendance.closes_at_s else None
