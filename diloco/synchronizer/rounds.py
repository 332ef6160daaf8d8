"""When a contribution is admitted and when a round closes. Pure: values in, a reason out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Refusal(StrEnum):
    """Why a contribution is not for the open round."""

    LATE = "late"
    """Its round has closed."""
    EARLY = "early"
    """Its round has not opened: the island is ahead of a synchronizer that went back to an older generation."""
    FENCED = "fenced"
    """A newer epoch of the slot has contributed."""


class Close(StrEnum):
    """Why a round closes."""

    QUORUM = "quorum"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a contribution says of itself."""

    round: int
    slot: int
    epoch: int
    tokens: int
    quorum: int | None = field(default=None, compare=False)
    """How many contributions the round was directed to; None leaves it to the settings."""


def refusal(claim: Claim, *, version: int, newest_epoch: int) -> Refusal | None:
    """Why the claim cannot enter the round that is open at this version; None when it can."""
    if claim.epoch < newest_epoch:
        return Refusal.FENCED
    if claim.round < version:
        return Refusal.LATE
    return Refusal.EARLY if claim.round > version else None


def close_reason(*, num_complete: int, quorum: int, closes_at_s: float | None, now_s: float) -> Close | None:
    """Why the round closes now; None while it stays open, as it does while nobody came."""
    if num_complete == 0:
        return None
    if num_complete >= quorum:
        return Close.QUORUM
    return Close.TIMEOUT if closes_at_s is not None and now_s >= closes_at_s else None
