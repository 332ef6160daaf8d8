"""The round that is open: who is in it, who may still come in, and when it closes. No clock, no files."""

from __future__ import annotations

from collections.abc import Mapping

from diloco.errors import FencedError, RoundClosedError
from diloco.schema import RoundState
from diloco.synchronizer.contribution import Accepted
from diloco.synchronizer.generation import Generation
from diloco.synchronizer.rounds import Claim, Close, Refusal, close_reason, refusal


class OpenRound:
    """The round on top of one generation."""

    def __init__(self, generation: Generation, *, quorum: int, timeout_s: float, epochs: Mapping[int, int]) -> None:
        self.generation = generation
        self.accepted: dict[int, Accepted] = {}
        self.epochs = dict(generation.outcome.epochs) | dict(epochs)
        """Newest epoch of each slot that a complete contribution carried; it outlives the round."""
        self.opened_s: float | None = None
        """Time of the first contribution, on a clock that never jumps; None while there is none."""
        self._opened_unix_s: float | None = None
        self._quorum = quorum
        self._timeout_s = timeout_s

    def refusal(self, claim: Claim) -> Refusal | None:
        """Why the claim cannot enter; None when it can."""
        newest = self.epochs.get(claim.slot, claim.epoch)
        return refusal(claim, version=self.generation.version, newest_epoch=newest)

    def error(self, claim: Claim, reason: Refusal) -> RoundClosedError | FencedError:
        """The refusal as the answer to the island."""
        version = self.generation.version
        if reason is Refusal.FENCED:
            return FencedError(
                f"epoch {claim.epoch} of slot {claim.slot} has given way to epoch {self.epochs[claim.slot]}",
                field="epoch",
                remedy="stop this process: another one holds the slot",
            )
        what = "has closed" if reason is Refusal.LATE else "has not opened"
        return RoundClosedError(
            f"round {claim.round} {what}, the global parameters are at version {version}",
            version=version,
            field="round",
            remedy="adopt the current version",
        )

    @property
    def quorum(self) -> int:
        """Contributions that close the round: as many as are configured, or as the round was directed to if fewer."""
        stated = (entry.claim.quorum for entry in self.accepted.values())
        return min([self._quorum, *(quorum for quorum in stated if quorum is not None)])

    def is_repeated(self, claim: Claim, digest: bytes) -> bool:
        """Whether this very contribution is in the open round, or made the generation below it."""
        mine = self.accepted.get(claim.slot)
        if mine is not None and (mine.claim, mine.digest) == (claim, digest):
            return True
        applied = self.generation.outcome.applied.get(claim.slot)
        return claim.round == self.generation.version - 1 and applied == digest.hex()

    def admit(self, accepted: Accepted, *, now_s: float, unix_s: float) -> bool:
        """Count a contribution in that came at this time; says whether it replaces an earlier one of its slot.

        From here on, older epochs of the slot are fenced.
        """
        claim = accepted.claim
        replaces = claim.slot in self.accepted
        self.accepted[claim.slot] = accepted
        self.epochs[claim.slot] = max(claim.epoch, self.epochs.get(claim.slot, claim.epoch))
        if self.opened_s is None or now_s < self.opened_s:
            self.opened_s, self._opened_unix_s = now_s, unix_s
        return replaces

    def clear(self) -> None:
        """Start over with nobody in."""
        self.accepted.clear()
        self.opened_s = self._opened_unix_s = None

    @property
    def closes_at_s(self) -> float | None:
        return None if self.opened_s is None else self.opened_s + self._timeout_s

    def close_reason(self, now_s: float) -> Close | None:
        return close_reason(
            num_complete=len(self.accepted), quorum=self.quorum, closes_at_s=self.closes_at_s, now_s=now_s
        )

    def state(self) -> RoundState:
        opened_s = self._opened_unix_s
        return RoundState(
            round=self.generation.version,
            opened_s=opened_s,
            slots=tuple(sorted(self.accepted)),
            quorum=self.quorum,
            closes_at_s=None if opened_s is None else opened_s + self._timeout_s,
        )
