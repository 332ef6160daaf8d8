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
from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco.boundary import Boundary, at_once
from diloco.errors import RoundClosedError
from diloco.fragment import manifest_of
from diloco.island import Capture, Contribution, Island, NonFiniteError
from diloco.protocol import SyncCommand
from diloco.schema import MAX_DETAIL, OuterState, SyncOutcome, SyncReport
from diloco.transport import Held, SynchronizerClient
from service.errors import UnavailableError, WadilocoError


@dataclass(slots=True)
class Tally:
    """What one sync has done so far; becomes the report."""

    started_s: float
    round: int
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


class Exchange:
    """Runs the syncs of one island against one synchronizer."""

    def __init__(self, island: Island, client: SynchronizerClient, *, slot: int) -> None:
        self._island = island
        self._client = client
        self._slot = slot
        self._at_boundary: Boundary = at_once
        self._offered: Contribution | None = None
        """Contribution whose push ended without an answer: it may have arrived."""
        self.outer_state: OuterState | None = None
        """What the synchronizer said of itself last."""

    def join(self, *, deadline_s: float) -> None:
        """Become part of the run: offer the initial parameters, or start from the global ones if there are any.

        Raises:
            ManifestError: the run trains another model.
            UnavailableError: no synchronizer until the deadline.
        """
        island = self._island
        reply = self._client.init(manifest_of(island.module), island.global_flat, deadline_s=deadline_s)
        if reply.accepted:
            island.version = reply.version
            return
        version = self._client.pull(reply.version, island.incoming, deadline_s=deadline_s)
        island.rebase(island.incoming, version)

    def capture(self) -> Capture:
        """The local parameters now, which `run` then contributes; at a step boundary."""
        return self._island.capture(beside=self._offered)

    def run(
        self, command: SyncCommand, *, captured: Capture | None = None, at_boundary: Boundary = at_once
    ) -> SyncReport | None:
        """One sync, at most until the command's deadline; None if the island already is beyond the command's round.

        It contributes what was captured, or what it captures itself.
        """
        self._at_boundary = at_boundary
        try:
            return self._run(command, captured)
        finally:
            self._at_boundary = at_once

    def _run(self, command: SyncCommand, captured: Capture | None) -> SyncReport | None:
        begun = self.begin(command, captured)
        if not isinstance(begun, Pending):
            return begun
        return self.finish(begun, lambda: self.await_end(begun))

    def begin(self, command: SyncCommand, captured: Capture | None = None) -> SyncReport | Pending | None:
        """Contribute. The report when that ended the sync, None if the island already is beyond the command's round."""
        tally = Tally(started_s=time.time(), round=self._island.version)
        return self._reported(command, tally, lambda: self._contribute(command, tally, captured))

    def await_end(self, pending: Pending) -> int:
        """Wait until the round closes, and download what it made; returns the version.

        Raises:
            TimeoutError: it is open at the deadline.
            WadilocoError: the download failed.
        """
        version = self._client.wait_version(pending.after_version, deadline_s=pending.command.deadline_s)
        if version is None:
            raise TimeoutError
        return self._pull(version, pending.command, pending.tally)

    def finish(self, pending: Pending, end: Callable[[], int]) -> SyncReport:
        """Adopt what ``end`` returned the version of (`await_end`), or report its error."""

        def adopt() -> SyncOutcome:
            version = end()
            self._at_boundary(lambda: self._take(version))
            return SyncOutcome.APPLIED

        report = self._reported(pending.command, pending.tally, adopt)
        assert isinstance(report, SyncReport), "a sync that was begun has an outcome"
        return report

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
                self._start_over()
        except TimeoutError:
            outcome, detail = SyncOutcome.FAILED, "round still open at the deadline"
        if outcome is None or isinstance(outcome, Pending):
            return outcome
        return SyncReport(
            round=tally.round,
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

    def _start_over(self) -> None:
        """Give up local progress that cannot be contributed, unless the inner loop has ended anyway."""
        island = self._island
        with contextlib.suppress(UnavailableError):
            self._at_boundary(lambda: island.rebase(island.global_flat, island.version))

    def _contribute(self, command: SyncCommand, tally: Tally, captured: Capture | None) -> SyncOutcome | Pending | None:
        island = self._island
        captured = captured or self._at_boundary(self.capture)
        self._settle(command)
        state = self._ask_state(command)
        version = state.fragments[0].version
        if captured.tokens > 0 and self._is_worth_as_stale(command, state):
            return self._push_own(captured, command, tally)
        if version != island.version:
            merged = self._adopt(version, command, tally)
            if merged is not None and (command.round is None or command.round <= merged.in_round):
                tally.was_merged(merged)
                return SyncOutcome.APPLIED
        elif self._slot not in state.fragments[0].open_round.slots:
            island.accepted = None
        if command.round is not None and command.round < island.version:
            return None
        if captured.round != island.version:
            captured = self._at_boundary(self.capture)
        accepted = island.accepted
        if (
            accepted is None
            or accepted.inner_steps != captured.inner_steps
            or accepted.round != island.version  # it rides along as a stale one, which no quorum counts
        ):
            return self._push_own(captured, command, tally)
        tally.stands_for(accepted)
        return Pending(command=command, tally=tally, after_version=island.version)

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
        island, version = self._island, state.fragments[0].version
        return (
            island.accepted is None
            and command.round == island.version
            and 0 < version - island.version <= state.max_staleness
        )

    def _settle(self, command: SyncCommand) -> None:
        """Learn what became of a contribution without an answer: the synchronizer knows a repetition by its digest."""
        if self._offered is not None:
            with contextlib.suppress(RoundClosedError):
                self._island.accepted = self._push(self._offered, command, Tally(started_s=0.0, round=0))

    def _ask_state(self, command: SyncCommand) -> OuterState:
        state = self._client.state(deadline_s=command.deadline_s, slot=self._slot, coming_to=command.round)
        if not state.initialized:
            # The synchronizer lost its disk: what the islands share is the best there is.
            island = self._island
            self._client.init(manifest_of(island.module), island.global_flat, deadline_s=command.deadline_s)
            state = self._client.state(deadline_s=command.deadline_s)
        self.outer_state = state
        return state

    def _push(self, contribution: Contribution, command: SyncCommand, tally: Tally) -> Contribution:
        """The contribution with the round that took it."""
        tally.stands_for(contribution)
        self._offered = contribution
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
            self._offered = None
            raise
        self._offered = None
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
