"""One outer round from the side of an island: contribute, wait for the round to close, adopt the new global parameters.

Nothing that happens here loses local progress: what the synchronizer has not merged stays in the local parameters, and
a contribution whose round outlives the deadline is remembered, so that the next sync adopts what became of it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch

from diloco.errors import RoundClosedError
from diloco.fragment import manifest_of, num_bytes
from diloco.island import Contribution, Island, NonFiniteError
from diloco.protocol import SyncCommand
from diloco.schema import SyncOutcome, SyncReport
from diloco.transport import SynchronizerClient
from service.errors import UnavailableError, WadilocoError

PULL_GRACE_S = 10.0
"""A round that closed just before the deadline is worth reading: without it the island would be behind all others."""


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

    def stands_for(self, contribution: Contribution) -> None:
        self.round = contribution.round
        self.inner_steps = contribution.inner_steps
        self.tokens = contribution.tokens
        self.update_norm = contribution.update_norm


class Exchange:
    """Runs the syncs of one island against one synchronizer."""

    def __init__(self, island: Island, client: SynchronizerClient, *, slot: int) -> None:
        self._island = island
        self._client = client
        self._slot = slot
        self._incoming = torch.empty_like(island.global_flat)
        self._num_bytes = num_bytes(manifest_of(island.module))
        self._offered: Contribution | None = None
        """Contribution whose push ended without an answer: it may have arrived."""

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
        version = self._client.pull(reply.version, self._incoming, deadline_s=deadline_s)
        island.rebase(self._incoming, version)

    def run(self, command: SyncCommand) -> SyncReport | None:
        """One sync, at most until the command's deadline; None if the island already is beyond the command's round."""
        tally = Tally(started_s=time.time(), round=self._island.version)
        detail = ""
        try:
            outcome = self._round(command, tally)
        except WadilocoError as exc:
            outcome, detail = SyncOutcome.FAILED, str(exc)
            if isinstance(exc, NonFiniteError):
                self._island.rebase(self._island.global_flat.clone(), self._island.version)
        except TimeoutError:
            outcome, detail = SyncOutcome.FAILED, "round still open at the deadline"
        if outcome is None:
            return None
        return SyncReport(
            round=tally.round,
            outcome=outcome,
            started_s=tally.started_s,
            pushed_s=tally.pushed_s,
            finished_s=time.time(),
            bytes_pushed=tally.bytes_pushed,
            bytes_pulled=tally.bytes_pulled,
            inner_steps=tally.inner_steps,
            tokens=tally.tokens,
            update_norm=tally.update_norm,
            autonomous=command.autonomous,
            detail=detail,
        )

    def _round(self, command: SyncCommand, tally: Tally) -> SyncOutcome | None:
        island = self._island
        self._settle(command)
        merged = self._catch_up(command, tally)
        if merged is not None and (command.round is None or command.round <= merged.round):
            tally.stands_for(merged)
            return SyncOutcome.APPLIED
        if command.round is not None and command.round < island.version:
            return None
        if island.accepted is None or island.accepted.inner_steps != island.steps_since_sync:
            try:
                island.accepted = self._push(island.contribution(), command, tally)
            except RoundClosedError as closed:
                # The round took the contribution of an earlier sync, or none of ours.
                merged = self._adopt(closed.version, command, tally)
                if merged is None:
                    return SyncOutcome.LATE
                tally.stands_for(merged)
                return SyncOutcome.APPLIED
        tally.stands_for(island.accepted)
        version = self._client.wait_version(island.version, deadline_s=command.deadline_s)
        if version is None:
            raise TimeoutError
        self._adopt(version, command, tally)
        return SyncOutcome.APPLIED

    def _settle(self, command: SyncCommand) -> None:
        """Learn what became of a contribution without an answer: the synchronizer knows a repetition by its digest."""
        if self._offered is not None:
            with contextlib.suppress(RoundClosedError):
                self._island.accepted = self._push(self._offered, command, Tally(started_s=0.0, round=0))

    def _catch_up(self, command: SyncCommand, tally: Tally) -> Contribution | None:
        """Bring the island to the current version; returns its accepted contribution if that was merged meanwhile."""
        island = self._island
        state = self._client.state(deadline_s=command.deadline_s)
        if not state.initialized:
            # The synchronizer lost its disk: what the islands share is the best there is.
            self._client.init(manifest_of(island.module), island.global_flat, deadline_s=command.deadline_s)
            state = self._client.state(deadline_s=command.deadline_s)
        fragment = state.fragments[0]
        if fragment.version != island.version:
            return self._adopt(fragment.version, command, tally)
        if self._slot not in fragment.open_round.slots:
            island.accepted = None
        return None

    def _push(self, contribution: Contribution, command: SyncCommand, tally: Tally) -> Contribution:
        tally.stands_for(contribution)
        self._offered = contribution
        try:
            self._client.push(
                contribution.local,
                round=contribution.round,
                slot=self._slot,
                epoch=command.epoch,
                # An island that trained on nothing still has to come: without it the quorum is not complete.
                tokens=max(1, contribution.tokens),
                quorum=command.quorum,
                deadline_s=command.deadline_s,
            )
        except UnavailableError:
            raise
        except WadilocoError:
            self._offered = None
            raise
        self._offered = None
        tally.pushed_s = time.time()
        tally.bytes_pushed = self._num_bytes
        return contribution

    def _adopt(self, version: int, command: SyncCommand, tally: Tally) -> Contribution | None:
        deadline_s = max(command.deadline_s, time.time() + PULL_GRACE_S)
        version = self._client.pull(version, self._incoming, deadline_s=deadline_s)
        tally.bytes_pulled += self._num_bytes
        return self._island.adopt(self._incoming, version)
