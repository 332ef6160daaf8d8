"""One outer round from the side of an island: contribute, wait for the round to close, adopt the new global parameters.

Nothing that happens here loses local progress: what the synchronizer has not merged stays in the local parameters, and
a contribution whose round outlives the deadline is remembered, so that the next sync adopts what became of it.

`begin` contributes, `await_end` waits and downloads, `finish` adopts; `run` does all of it. What touches the module
goes through a `Boundary`: an island that syncs with overlap captures its parameters (`Exchange.capture`), takes inner
steps while `run` is under way on another thread, and stops between two of them when that has something to adopt.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco.boundary import Boundary, at_once
from diloco.errors import RoundClosedError
from diloco.island import Capture, Contribution, Island, NonFiniteError
from diloco.protocol import SyncCommand
from diloco.schema import MAX_DETAIL, FragmentState, InitReply, OuterState, SyncOutcome, SyncReport
from diloco.transport import Held, SynchronizerClient
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
    def await_end(self, pending: Pending) -> int:
        """Wait until the round closes, and download what it made; returns the version.

        Raises:
            TimeoutError: it is open at the deadline.
            WadilocoError: the download failed.
        """

    def finish(self, pending: Pending, end: Callable[[], int]) -> SyncReport:
        """Adopt what ``end`` returned the version of (`await_end`), or report its error."""

        def adopt() -> SyncOutcome:
            self._take_end(pending, end())
            return SyncOutcome.APPLIED

        report = self._reported(pending.command, pending.tally, adopt)
        assert isinstance(report, SyncReport), "a sync that was begun has an outcome"
        return report

    @abstractmethod
    def _take_end(self, pending: Pending, version: int) -> None:
        """Go on from what was downloaded."""

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


class Exchange(Syncs):
    """Runs the syncs of one island, or of one of its fragments, against one synchronizer."""

    def __init__(
        self,
        island: Island,
        client: SynchronizerClient,
        *,
        slot: int,
        fragment: int = 0,
        begin_run: Callable[[float], object] | None = None,
        check: Callable[[OuterState], None] = lambda _: None,
    ) -> None:
        """``begin_run`` offers the whole model, until the deadline that it is given; None: this is the whole model.
        ``check`` raises when the synchronizer has come to hold another run.
        """
        self._island = island
        self._client = client
        self._slot = slot
        self._fragment = fragment
        self._begin_run = begin_run or self._offer
        self._check = check
        self.offered: Contribution | None = None
        """Contribution whose push ended without an answer: it may have arrived."""
        self.before_push: Callable[[Contribution], None] = lambda _: None
        """Called with each contribution that is about to travel."""

    @property
    def version(self) -> int:
        """Of the global parameters that the island last adopted."""
        return self._island.version

    def join(self, *, deadline_s: float) -> None:
        """Become part of the run: offer the initial parameters, or start from the global ones if there are any.

        Raises:
            ManifestError: the run trains another model.
            UnavailableError: no synchronizer until the deadline.
        """
        island = self._island
        reply = self._offer(deadline_s)
        if reply.accepted:
            island.version = reply.version
        else:
            self.start_from(reply.version, deadline_s=deadline_s)

    def start_from(self, version: int, *, deadline_s: float) -> None:
        """Download the global parameters, ``version`` or newer, and start from them."""
        island = self._island
        version = self._client.pull(version, island.incoming, deadline_s=deadline_s)
        self.forget_offer()
        island.rebase(island.incoming, version)

    def forget_offer(self) -> None:
        """The island goes on without the progress that a push without an answer stands for: it must not come again."""
        self.offered = None

    def capture(self, command: SyncCommand | None = None) -> Capture:
        return self._island.capture(beside=self.offered)

    def begin(self, command: SyncCommand, captured: Capture | None = None) -> SyncReport | Pending | None:
        tally = Tally(started_s=time.time(), round=self._island.version)
        return self._reported(command, tally, lambda: self.contribute(command, tally, captured))

    def await_end(self, pending: Pending) -> int:
        version = self._client.wait_version(pending.after_version, deadline_s=pending.command.deadline_s)
        if version is None:
            raise TimeoutError
        return self._pull(version, pending.command, pending.tally)

    def _take_end(self, pending: Pending, version: int) -> None:
        self._at_boundary(lambda: self._take(version))

    def _start_over(self) -> None:
        self._island.rebase(self._island.global_flat, self._island.version)

    def _offer(self, deadline_s: float) -> InitReply:
        return self._client.init(self._island.manifest, self._island.global_flat, deadline_s=deadline_s)

    def contribute(self, command: SyncCommand, tally: Tally, captured: Capture | None) -> SyncOutcome | Pending | None:
        """What `begin` reports of."""
        island = self._island
        captured = captured or self._at_boundary(self.capture)
        self.settle(command)
        state = self._ask_state(command)
        if captured.tokens > 0 and self._is_worth_as_stale(command, state):
            return self._push_own(captured, command, tally)
        merged = self.follow(state, command, tally)
        if merged is not None and (command.round is None or command.round <= merged.in_round):
            tally.was_merged(merged)
            return SyncOutcome.APPLIED
        if command.round is not None and command.round < island.version:
            return None
        if captured.round != island.version:
            captured = self._at_boundary(self.capture)
        accepted = island.accepted
        if (
            accepted is not None
            and accepted.inner_steps == captured.inner_steps
            and accepted.round == island.version  # else it rides along as a stale one, which no quorum counts
        ):
            tally.stands_for(accepted)
        elif accepted is None and self._is_in(state):
            # With progress that was left behind, as by a worker that died: it stays, and ours is for the next round.
            tally.round = island.version
        else:
            return self._push_own(captured, command, tally)
        return Pending(command=command, tally=tally, after_version=island.version)

    def _is_in(self, state: OuterState) -> bool:
        """Whether the round of the current version holds a contribution of the slot that its quorum counts."""
        version, mine = self._island.version, self._mine(state)
        entries = mine.open_round.contributions
        return mine.version == version and any(e.slot == self._slot and e.round == version for e in entries)

    def follow(self, state: OuterState, command: SyncCommand, tally: Tally) -> Contribution | None:
        """Adopt the version that the state tells of; the own contribution that is in it, if one is."""
        mine = self._mine(state)
        if mine.version != self._island.version:
            return self._adopt(mine.version, command, tally)
        if self._slot not in mine.open_round.slots:
            self._island.accepted = None
        return None

    def _mine(self, state: OuterState) -> FragmentState:
        return state.fragments[self._fragment]

    def _push_own(self, captured: Capture, command: SyncCommand, tally: Tally) -> SyncOutcome | Pending:
        """Contribute the local parameters as they were captured."""
        island = self._island
        try:
            accepted = self._push(island.encode(captured), command, tally)
        except RoundClosedError as closed:
            # The round took the contribution of an earlier sync, or none of ours.
            merged = self._adopt(closed.version, command, tally)
            if merged is None:
                return SyncOutcome.LATE
            tally.was_merged(merged)
            return SyncOutcome.APPLIED
        island.accepted = accepted
        if tally.staleness:
            self._adopt(accepted.in_round, command, tally)
            return SyncOutcome.STALE
        return Pending(command=command, tally=tally, after_version=island.version)

    def _is_worth_as_stale(self, command: SyncCommand, state: OuterState) -> bool:
        """Whether to contribute to a round that is over, rather than to keep the progress for the next."""
        island, version = self._island, self._mine(state).version
        return (
            island.accepted is None
            and command.round == island.version
            and 0 < version - island.version <= state.max_staleness
        )

    def settle(self, command: SyncCommand) -> None:
        """Learn what became of a contribution without an answer: the synchronizer knows a repetition by its digest."""
        if self.offered is not None:
            with contextlib.suppress(RoundClosedError):
                self._island.accepted = self._push(self.offered, command, Tally(started_s=0.0, round=0))

    def _ask_state(self, command: SyncCommand) -> OuterState:
        state = self._client.state(deadline_s=command.deadline_s, slot=self._slot, coming_to=command.round)
        if not state.initialized:
            # The synchronizer lost its disk: what the islands share is the best there is.
            self._begin_run(command.deadline_s)
            state = self._client.state(deadline_s=command.deadline_s)
        self._check(state)
        self.outer_state = state
        return state

    def _push(self, contribution: Contribution, command: SyncCommand, tally: Tally) -> Contribution:
        """The contribution with the round that took it."""
        tally.stands_for(contribution)
        self.before_push(contribution)
        self.offered = contribution
        try:
            reply = self._client.push(
                contribution.payload,
                codec=self._island.codec.name,
                round=contribution.round,
                slot=self._slot,
                epoch=command.epoch,
                # An island that trained on nothing still has to come: without it the quorum is not complete.
                tokens=max(1, contribution.tokens),
                quorum=command.quorum,
                expected=command.expected,
                close_by_s=command.close_by_s,
                deadline_s=command.deadline_s,
            )
        except UnavailableError:
            raise
        except WadilocoError:
            self.offered = None
            raise
        self.offered = None
        tally.pushed_s = time.time()
        tally.bytes_pushed = contribution.payload.numel()
        tally.staleness, tally.staleness_weight = reply.staleness, reply.staleness_weight
        return replace(contribution, into=reply.round)

    def _adopt(self, version: int, command: SyncCommand, tally: Tally) -> Contribution | None:
        pulled = self._pull(version, command, tally)
        return self._at_boundary(lambda: self._take(pulled))

    def _take(self, version: int) -> Contribution | None:
        """Go on from what was downloaded; the own contribution that is in it, if one is."""
        island, accepted = self._island, self._island.accepted
        if accepted is not None and island.version < version <= accepted.in_round:
            island.carry(accepted, island.incoming, version)
            return None
        return island.adopt(island.incoming, version)

    def _pull(self, version: int, command: SyncCommand, tally: Tally) -> int:
        deadline_s = max(command.deadline_s, time.time() + command.pull_grace_s)
        island, client = self._island, self._client
        before, mismatches = client.bytes_pulled, client.mismatches
        held = Held(version=island.version, parameters=island.global_flat)
        try:
            return client.pull(version, island.incoming, deadline_s=deadline_s, held=held)
        finally:
            tally.bytes_pulled += client.bytes_pulled - before
            tally.state_mismatches += client.mismatches - mismatches
