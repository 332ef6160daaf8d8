"""One outer round from the side of an island: contribute, wait for the round to close, adopt the new global parameters.

Nothing that happens here loses local progress: what the synchronizer has not merged stays in the local parameters, and
a contribution whose round outlives the deadline is remembered, so that the next sync adopts what became of it.

`begin` contributes, `await_end` waits and downloads, `finish` adopts; `run` does all of it. What touches the module
goes through a `Boundary`: an island that syncs with overlap captures its parameters (`Exchange.capture`), takes inner
steps while `run` is under way on another thread, and stops between two of them when that has something to adopt.

A contribution is settled when the synchronizer says that it is in what was downloaded (`diloco.applied`), and kept
otherwise. Where the synchronizer has come to hold another run (it lost its disk, or was given another one), nothing of
the old run is settled or sent again: the island goes on from the other run's parameters with all of its own progress
since it last adopted any, which is its next pseudo-gradient.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from diloco.applied import Pulled
from diloco.errors import AnotherRunError, NotInitializedError, RoundClosedError
from diloco.incoming import Held
from diloco.island import Capture, Contribution, Island
from diloco.protocol import SyncCommand
from diloco.schema import FragmentState, InitReply, Manifest, OuterState, SyncOutcome, SyncReport
from diloco.syncs import Pending, Syncs, Tally
from diloco.transport import SynchronizerClient, check_model
from service.errors import UnavailableError, WadilocoError

logger = logging.getLogger(__name__)

LEFT_OUT = "the outer step left the contribution out: its progress is kept"


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
        whole: Callable[[], Manifest] | None = None,
    ) -> None:
        """``begin_run`` offers the whole model, until the deadline that it is given, and ``whole`` is its manifest;
        None: this is the whole model. ``check`` raises when the synchronizer has come to cut it otherwise.
        """
        self._island = island
        self._client = client
        self._slot = slot
        self._fragment = fragment
        self._begin_run = begin_run or self._offer
        self._check = check
        self._whole = whole or (lambda: island.manifest)
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
        reply = self._offer(deadline_s)
        if reply.accepted:
            self.begun(reply)
        else:
            self.start_from(reply.version, deadline_s=deadline_s)

    def begun(self, reply: InitReply) -> None:
        """The run has begun with the parameters of this island."""
        self._island.version, self._island.run = reply.version, reply.run

    def start_from(self, version: int, *, deadline_s: float) -> None:
        """Download the global parameters, ``version`` or newer, and start from them."""
        island = self._island
        pulled = self._client.fetch(version, island.incoming, deadline_s=deadline_s)
        self.forget_offer()
        island.rebase(island.incoming, pulled.version)
        island.run = pulled.run

    def forget_offer(self) -> None:
        """The island goes on without the progress that a push without an answer stands for: it must not come again."""
        self.offered = None

    def capture(self, command: SyncCommand | None = None) -> Capture:
        return self._island.capture(beside=self.offered)

    def begin(self, command: SyncCommand, captured: Capture | None = None) -> SyncReport | Pending | None:
        tally = Tally(started_s=time.time(), round=self._island.version)
        return self._reported(command, tally, lambda: self.contribute(command, tally, captured))

    def await_end(self, pending: Pending) -> Pulled:
        version = self._client.wait_version(pending.after_version, deadline_s=pending.command.deadline_s)
        if version is None:
            raise TimeoutError
        return self._pull(version, pending.command, pending.tally)

    def _take_end(self, pending: Pending, pulled: Pulled) -> SyncOutcome:
        is_own = self._island.accepted is not None
        if self._at_boundary(lambda: self._take(pulled)) is None and is_own:
            pending.tally.detail = LEFT_OUT
            return SyncOutcome.LATE
        return SyncOutcome.APPLIED

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
        self._meet(state, command, tally)
        if captured.run != island.run:
            captured = self._at_boundary(self.capture)
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
        self._meet(state, command, tally)
        mine = self._mine(state)
        if mine.version != self._island.version:
            return self._adopt(mine.version, command, tally)
        if self._slot not in mine.open_round.slots:
            self._island.accepted = None
        return None

    def _meet(self, state: OuterState, command: SyncCommand, tally: Tally) -> None:
        """Go over to the run that the state tells of, with all local progress, if that is another one."""
        island, mine = self._island, self._mine(state)
        run = mine.run
        if run is None or island.run == run:
            return
        if island.run is None:  # who joined an older synchronizer, or goes on from an older state, never heard of one
            island.run = run
            return
        check_model(state, self._whole())
        logger.warning(
            "the synchronizer holds another run, going on there with all local progress run=%s version=%d steps=%d",
            run,
            mine.version,
            island.steps_since_sync,
        )
        pulled = self._pull(mine.version, command, tally, run=run)
        self.forget_offer()
        self._at_boundary(lambda: island.go_over(island.incoming, pulled.version, run=run))

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
            with contextlib.suppress(RoundClosedError, AnotherRunError, NotInitializedError):
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
                run=self._island.run,
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
        return replace(contribution, into=reply.round, digest=reply.digest)

    def _adopt(self, version: int, command: SyncCommand, tally: Tally) -> Contribution | None:
        pulled = self._pull(version, command, tally)
        return self._at_boundary(lambda: self._take(pulled))

    def _take(self, pulled: Pulled) -> Contribution | None:
        """Go on from what was downloaded; the own contribution that is in it, if one is."""
        island, accepted = self._island, self._island.accepted
        if accepted is not None and island.version < pulled.version <= accepted.in_round:
            island.carry(accepted, island.incoming, pulled.version)
            return None
        holds = None if accepted is None else pulled.has(accepted)
        return island.adopt(island.incoming, pulled.version, holds=holds)

    def _pull(self, version: int, command: SyncCommand, tally: Tally, *, run: str | None = None) -> Pulled:
        """Download it; of another ``run`` than the island's own it comes whole.

        Raises:
            AnotherRunError: the synchronizer has come to hold another run meanwhile.
        """
        deadline_s = max(command.deadline_s, time.time() + command.pull_grace_s)
        island, client = self._island, self._client
        before, mismatches = client.bytes_pulled, client.mismatches
        base = Held(version=island.version, parameters=island.global_flat) if run is None else None
        wanted = run or island.run
        try:
            pulled = client.fetch(version, island.incoming, deadline_s=deadline_s, held=base, slot=self._slot)
        finally:
            tally.bytes_pulled += client.bytes_pulled - before
            tally.state_mismatches += client.mismatches - mismatches
        if None not in {wanted, pulled.run} and pulled.run != wanted:
            raise AnotherRunError(
                f"the synchronizer holds run {pulled.run}, the sync was of run {wanted}",
                field="run",
                remedy="the next sync goes over to it",
            )
        return pulled
