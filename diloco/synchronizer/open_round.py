"""The round that is open: who is in it, who may still come in, and when it closes. No clock, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import AnotherRunError, FencedError, RoundClosedError
from diloco.schema import ContributionState, RoundState
from diloco.synchronizer.contribution import Accepted
from diloco.synchronizer.generation import Generation
from diloco.synchronizer.grace import Arrivals, grace_s, live_slots
from diloco.synchronizer.published import Published
from diloco.synchronizer.rounds import (
    Attendance,
    Claim,
    Close,
    Refusal,
    RoundRules,
    Standing,
    close_reason,
    refusal,
    staleness_weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The round that holds a contribution, and how many versions after the one that it is against."""

    round: int
    staleness: int


class OpenRound:
    """The round on top of the newest generation that is published."""

    def __init__(
        self, published: Published, rules: RoundRules, *, epochs: Mapping[int, int], history: tuple[Arrivals, ...]
    ) -> None:
        newest = published.newest
        assert newest is not None, "there is a round only on top of parameters"
        self.generation: Generation = newest
        self.accepted: dict[int, Accepted] = {}
        self.epochs = dict(self.generation.outcome.epochs) | dict(epochs)
        """Newest epoch of each slot that a complete contribution carried; it outlives the round."""
        self.history = history
        """When contributions to earlier rounds came."""
        self._opened_unix_s: float | None = None
        self._arrived_s: dict[int, float] = {}
        """First fresh arrival of each slot."""
        self._published = published
        self._rules = rules

    def refusal(self, claim: Claim) -> Refusal | None:
        """Why the claim cannot enter; None when it can."""
        mine = self.accepted.get(claim.slot)
        is_like_mine = mine is not None and (mine.claim.round, mine.claim.epoch) == (claim.round, claim.epoch)
        standing = Standing(
            version=self.generation.version,
            run=self.generation.run,
            newest_epoch=self.epochs.get(claim.slot, claim.epoch),
            # Nothing can be made of a contribution against parameters that are not there any more.
            max_staleness=min(self._rules.max_staleness, self._published.depth),
            # A copy of an older contribution that was on its way for long must not replace a newer one either.
            merged_version=max(self._published.merged_version(claim.slot), mine.claim.round if mine is not None else 0),
            same_round_tokens=mine.claim.tokens if mine is not None and is_like_mine else 0,
        )
        return refusal(claim, standing)

    def error(self, claim: Claim, reason: Refusal) -> RoundClosedError | FencedError | AnotherRunError:
        """The refusal as the answer to the island."""
        version = self.generation.version
        if reason is Refusal.OTHER_RUN:
            return AnotherRunError(
                f"the contribution is for run {claim.run}, here is run {self.generation.run}",
                field="run",
                remedy="go over to its parameters, or contribute where the other run is",
            )
        if reason is Refusal.FENCED:
            return FencedError(
                f"epoch {claim.epoch} of slot {claim.slot} has given way to epoch {self.epochs[claim.slot]}",
                field="epoch",
                remedy="stop this process: another one holds the slot",
            )
        what = "has not opened" if reason is Refusal.EARLY else "has closed"
        return RoundClosedError(
            f"round {claim.round} {what}, the global parameters are at version {version}",
            version=version,
            field="round",
            remedy="adopt the current version",
        )

    @property
    def quorum(self) -> int:
        """Contributions that the round must have: as many as are configured, or as it was directed to if fewer."""
        stated = (entry.claim.quorum for entry in self._fresh)
        return min([self._rules.quorum, *(quorum for quorum in stated if quorum is not None)])

    def find(self, claim: Claim, digest: bytes) -> Place | None:
        """Where this very contribution is already: in the open round, or in the parameters."""
        if claim.run not in {None, self.generation.run}:
            return None
        mine = self.accepted.get(claim.slot)
        if mine is not None and (mine.claim, mine.digest) == (claim, digest):
            return Place(round=mine.into, staleness=mine.staleness)
        into = self._published.round_with(claim.slot, digest, against=claim.round)
        return None if into is None else Place(round=into, staleness=into - claim.round)

    def admit(self, accepted: Accepted, *, now_s: float, unix_s: float) -> bool:
        """Count a contribution in that came at this time; says whether it replaces an earlier one of its slot.

        From here on, older epochs of the slot are fenced.
        """
        claim = accepted.claim
        replaces = claim.slot in self.accepted
        self.accepted[claim.slot] = accepted
        self.epochs[claim.slot] = max(claim.epoch, self.epochs.get(claim.slot, claim.epoch))
        if accepted.staleness == 0:
            if self.opened_s is None or now_s < self.opened_s:
                self._opened_unix_s = unix_s
            self._arrived_s.setdefault(claim.slot, now_s)
        return replaces

    @property
    def opened_s(self) -> float | None:
        """Time of the first fresh contribution, on a clock that never jumps; None while there is none."""
        return min(self._arrived_s.values(), default=None)

    def clear(self) -> None:
        """Start over with nobody in."""
        self.accepted.clear()
        self._arrived_s.clear()
        self._opened_unix_s = None

    def arrivals(self) -> Arrivals:
        """When the fresh contributions came."""
        first_s = self.opened_s or 0.0
        return Arrivals(
            round=self.generation.version,
            offsets_s={slot: arrived_s - first_s for slot, arrived_s in self._arrived_s.items()},
        )

    @property
    def grace_s(self) -> float:
        """How long the round waits for stragglers after its quorum."""
        rules = self._rules
        return grace_s(self.history, self.quorum, floor_s=rules.grace_min_s, ceiling_s=rules.grace_max_s)

    @property
    def grace_until_s(self) -> float | None:
        """When the grace for stragglers ends; None while the quorum is not in."""
        arrived_s, quorum = sorted(self._arrived_s.values()), self.quorum
        return None if len(arrived_s) < quorum else arrived_s[quorum - 1] + self.grace_s

    @property
    def closes_at_s(self) -> float | None:
        """When the round closes with those who came, whoever they are; None while nobody did."""
        if self.opened_s is None:
            return None
        told_s = [
            self._arrived_s[entry.claim.slot] + entry.claim.closes_in_s
            for entry in self._fresh
            if entry.claim.closes_in_s is not None
        ]
        return min([self.opened_s + self._rules.timeout_s, *told_s])

    @property
    def due_s(self) -> float | None:
        """When to look again whether the round closes; None while nobody is in it."""
        return min((at_s for at_s in (self.grace_until_s, self.closes_at_s) if at_s is not None), default=None)

    def close_reason(self, now_s: float) -> Close | None:
        attendance = Attendance(
            num_fresh=len(self._fresh),
            quorum=self.quorum,
            awaits_others=self._awaits_others,
            grace_until_s=self.grace_until_s,
            closes_at_s=self.closes_at_s,
        )
        return close_reason(attendance, now_s)

    def weight(self, staleness: int) -> float:
        """Of a contribution that is so many versions behind."""
        return staleness_weight(staleness, exponent=self._rules.staleness_exponent)

    def state(self) -> RoundState:
        return RoundState(
            round=self.generation.version,
            opened_s=self._opened_unix_s,
            slots=tuple(sorted(self.accepted)),
            quorum=self.quorum,
            closes_at_s=self._as_unix(self.closes_at_s),
            expected=self._expected,
            grace_until_s=self._as_unix(self.grace_until_s),
            contributions=tuple(
                ContributionState(
                    slot=slot,
                    round=entry.claim.round,
                    tokens=entry.claim.tokens,
                    staleness=entry.staleness,
                    staleness_weight=self.weight(entry.staleness),
                    codec=entry.claim.codec,
                )
                for slot, entry in sorted(self.accepted.items())
            ),
        )

    def _as_unix(self, at_s: float | None) -> float | None:
        if at_s is None or self.opened_s is None or self._opened_unix_s is None:
            return None
        return self._opened_unix_s + (at_s - self.opened_s)

    @property
    def _fresh(self) -> list[Accepted]:
        return [entry for entry in self.accepted.values() if entry.staleness == 0]

    @property
    def _expected(self) -> int | None:
        """To how many islands the round was directed; None when nobody said."""
        return max((entry.claim.expected for entry in self._fresh if entry.claim.expected is not None), default=None)

    @property
    def _awaits_others(self) -> bool:
        expected = self._expected
        if expected is not None:
            return len(self._fresh) < expected
        return bool(live_slots(self.history) - {entry.claim.slot for entry in self._fresh})
