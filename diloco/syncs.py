"""What a sync is made of, whatever takes part in it: an island (`diloco.exchange`), or one in fragments
(`diloco.streaming`).
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from diloco.applied import Pulled
from diloco.boundary import Boundary, at_once
from diloco.island import Capture, Contribution, NonFiniteError
from diloco.protocol import SyncCommand
from diloco.schema import MAX_DETAIL, OuterState, SyncOutcome, SyncReport
from diloco.turns import Place, round_of
from service.errors import UnavailableError, WadilocoError


@dataclass(slots=True)
class Tally:
    """What one sync has done so far; becomes the report."""

    started_s: float
    round: int
    """As the fragment counts; the report says it as the run does."""
    fragment: int = 0
    num_fragments: int = 1
    inner_steps: int = 0
    tokens: int = 0
    update_norm: float | None = None
    pushed_s: float | None = None
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    state_mismatches: int = 0
    staleness: int = 0
    staleness_weight: float | None = None
    detail: str = ""

    def stands_for(self, contribution: Contribution) -> None:
        self.round = contribution.round
        self.inner_steps = contribution.inner_steps
        self.tokens = contribution.tokens
        self.update_norm = contribution.update_norm

    def was_merged(self, contribution: Contribution) -> None:
        """The sync ended with what an earlier one had contributed."""
        self.stands_for(contribution)
        self.round = contribution.in_round


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A contribution whose round is open."""

    command: SyncCommand
    tally: Tally
    after_version: int
    """The round closes with a version newer than this."""


class Syncs(ABC):
    """What a sync is made of, whatever takes part in it."""

    outer_state: OuterState | None = None
    """What the synchronizer said of itself last."""
    _at_boundary: Boundary = staticmethod(at_once)

    @abstractmethod
    def capture(self, command: SyncCommand) -> Capture:
        """The local parameters now, which `run` then contributes by that command; at a step boundary."""

    def run(
        self, command: SyncCommand, *, captured: Capture | None = None, at_boundary: Boundary = at_once
    ) -> SyncReport | None:
        """One sync, at most until the command's deadline; None if the island already is beyond the command's round.

        It contributes what was captured, or what it captures itself.
        """
        self.meet_at(at_boundary)
        try:
            return self._run(command, captured)
        finally:
            self.meet_at(at_once)

    def meet_at(self, boundary: Boundary) -> None:
        """Touch the module there from now on."""
        self._at_boundary = boundary

    def _run(self, command: SyncCommand, captured: Capture | None) -> SyncReport | None:
        begun = self.begin(command, captured)
        if not isinstance(begun, Pending):
            return begun
        return self.finish(begun, lambda: self.await_end(begun))

    @abstractmethod
    def begin(self, command: SyncCommand, captured: Capture | None = None) -> SyncReport | Pending | None:
        """Contribute. The report when that ended the sync, None if the island already is beyond the command's round."""

    @abstractmethod
    def await_end(self, pending: Pending) -> Pulled:
        """Wait until the round closes, and download what it made.

        Raises:
            TimeoutError: it is open at the deadline.
            WadilocoError: the download failed, or is of another run.
        """

    def finish(self, pending: Pending, end: Callable[[], Pulled]) -> SyncReport:
        """Adopt what ``end`` tells of (`await_end`), or report its error."""
        report = self._reported(pending.command, pending.tally, lambda: self._take_end(pending, end()))
        assert isinstance(report, SyncReport), "a sync that was begun has an outcome"
        return report

    @abstractmethod
    def _take_end(self, pending: Pending, pulled: Pulled) -> SyncOutcome:
        """Go on from what was downloaded; whether it has what was contributed in it."""

    @abstractmethod
    def _start_over(self) -> None:
        """Drop the local progress, which is no use any more."""

    def _reported(
        self, command: SyncCommand, tally: Tally, work: Callable[[], SyncOutcome | Pending | None]
    ) -> SyncReport | Pending | None:
        """The report of what ``work`` did to the tally; what it returned where that is no outcome."""
        detail = ""
        try:
            outcome = work()
            detail = tally.detail
        except WadilocoError as exc:
            outcome, detail = SyncOutcome.FAILED, str(exc)
            if isinstance(exc, NonFiniteError):
                # Unless the inner loop has ended anyway.
                with contextlib.suppress(UnavailableError):
                    self._at_boundary(self._start_over)
        except TimeoutError:
            outcome, detail = SyncOutcome.FAILED, "round still open at the deadline"
        if outcome is None or isinstance(outcome, Pending):
            return outcome
        return SyncReport(
            round=round_of(Place(tally.fragment, tally.round), tally.num_fragments),
            outcome=outcome,
            started_s=tally.started_s,
            pushed_s=tally.pushed_s,
            finished_s=time.time(),
            bytes_pushed=tally.bytes_pushed,
            bytes_pulled=tally.bytes_pulled,
            state_mismatches=tally.state_mismatches,
            inner_steps=tally.inner_steps,
            tokens=tally.tokens,
            update_norm=tally.update_norm,
            autonomous=command.autonomous,
            staleness=tally.staleness,
            staleness_weight=tally.staleness_weight,
            detail=detail[:MAX_DETAIL],
        )
