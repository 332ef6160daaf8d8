"""How an island's first rank comes into the run: from a snapshot of its own, or from the global parameters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from diloco.group import PeerLostError
from diloco.protocol import RestoredEvent
from diloco.schema import FragmentState, Rung
from diloco.vault.members import Captured
from diloco.vault.restore import Choice
from diloco.vault.resumption import Resumed, compare, take_over
from diloco.worker_rank import Rank
from diloco.worker_reports import LastSync, Reports
from diloco.worker_steps import Steps
from diloco.worker_syncs import WorkerSyncs
from service.errors import UnavailableError

logger = logging.getLogger("diloco.worker")

JOIN_ATTEMPT_S = 10.0
COMPARE_S = 1.0
"""For a synchronizer to say where the run is, to a worker that goes on from its own snapshot."""


def join_run(rank: Rank, *, holds: Callable[[int, FragmentState], bool]) -> bool:
    """Wait for the synchronizer, as long as it takes: without global parameters nothing can be contributed.

    ``holds`` says of which fragments the island holds the global parameters already. False: told to stop meanwhile.
    """

    def join() -> None:
        deadline_s, num_fragments = time.time() + JOIN_ATTEMPT_S, rank.config.num_fragments
        rank.exchange.join(deadline_s=deadline_s, num_fragments=num_fragments, holds=holds)

    while not rank.inbox.stop.is_set():
        try:
            rank.transfers.call(join)
        except PeerLostError:
            raise
        except UnavailableError as exc:
            if not rank.inbox.stop.is_set():
                logger.warning("no synchronizer yet, trying on error=%s", exc)
        else:
            return not rank.inbox.stop.is_set()
    return False


def tell_lost_residual(rank: Rank) -> None:
    """Only the worker that encoded knows what the codec left out: the next one of the slot starts without it."""
    if rank.island.residual_norm is not None and rank.config.start_step > 0:
        logger.warning(
            "what the codec left out of the slot's contributions so far is lost codec=%s step=%d",
            rank.config.codec,
            rank.config.start_step,
        )


class Resumption:
    """Goes on from a snapshot, if one was chosen."""

    def __init__(self, rank: Rank, choice: Choice, steps: Steps, reports: Reports, syncs: WorkerSyncs) -> None:
        self._rank = rank
        self._choice = choice
        self._steps = steps
        self._reports = reports
        self._syncs = syncs
        self._lost = ""
        """What could not be restored."""

    def resume(self) -> Resumed | None:
        """Go on from a snapshot, if there is one and the run is where it can be gone on from; None: join the run."""
        chosen, guard = self._choice.chosen, self._rank.guard
        if chosen is None:
            return None
        resumed = take_over(chosen, self._rank.island, self._rank.exchange)
        guard.load(chosen)
        refused = self._compare(resumed, is_sure=chosen.is_sure and self._vault_is_own)
        if refused is None:
            return None
        under_way = resumed.state.under_way
        if refused and under_way is not None and under_way.fragment in refused:
            resumed = resumed._replace(state=resumed.state.model_copy(update={"under_way": None}))
        if refused:
            self._lost = f"steps since the last sync of fragments {refused}: they may be in the run already"
        self._steps.inner.loss = resumed.state.loss
        self._reports.last_sync = LastSync(at_s=resumed.state.last_sync_at_s, loss=resumed.state.loss_at_sync)
        guard.go_on_from(chosen, contributions=resumed.contributions)
        return resumed

    @property
    def _vault_is_own(self) -> bool:
        vault = self._rank.config.vault
        return vault is not None and vault.is_own

    def _compare(self, resumed: Resumed, *, is_sure: bool) -> list[int] | None:
        """Which fragments start from the global parameters instead; None: told to stop meanwhile."""
        rank = self._rank

        def ask() -> list[int]:
            wait_s = COMPARE_S if is_sure else JOIN_ATTEMPT_S
            return compare(
                resumed,
                rank.island,
                rank.exchange,
                rank.shards,
                slot=rank.config.slot,
                is_sure=is_sure,
                deadline_s=time.time() + wait_s,
            )

        while not rank.inbox.stop.is_set():
            try:
                return rank.transfers.call(ask)
            except PeerLostError:
                raise
            except UnavailableError as exc:
                if is_sure:
                    # As if it had gone away a moment later: the next sync finds out what became of the run.
                    logger.warning("no synchronizer, going on without having asked it error=%s", exc)
                    return []
        return None

    def tell_start(self, resumed: Resumed | None) -> None:
        """Say what the worker goes on from, whether that is a snapshot or not."""
        config, chosen, now_s = self._rank.config, self._choice.chosen, time.time()
        is_restored = resumed is not None and chosen is not None
        rung = Rung.GLOBAL if config.start_step else Rung.FRESH
        if is_restored and config.vault is not None:
            rung = config.vault.rung
        self._rank.emit(
            RestoredEvent(
                rung=rung,
                generation=chosen.generation.number if chosen is not None else None,
                step=self._steps.inner.step,
                refused=tuple(self._choice.refused),
                lost=self._lost,
                begun_s=chosen.begun_s if chosen is not None else now_s,
                fetched_s=chosen.fetched_s if chosen is not None else now_s,
                loaded_s=now_s,
            )
        )
        self._reports.make_due()  # after the first step: until then it has not come back

    def go_on(self, resumed: Resumed) -> None:
        """Take up a sync that was under way, and then the random numbers, which nothing may draw from meanwhile."""
        syncs, under_way = self._syncs, resumed.state.under_way
        if under_way is not None:
            command = under_way.command
            command = command.model_copy(update={"epoch": max(command.epoch, syncs.epoch)})
            captured = resumed.captured.get(under_way.fragment)
            syncs.begun = (under_way, Captured(under_way.fragment, captured)) if captured is not None else None
            if command.overlap:
                syncs.overlap(command, captured, started_s=under_way.started_s, due_step=under_way.due_step)
        chosen = self._choice.chosen
        assert chosen is not None
        self._rank.guard.load_random(chosen)
        if under_way is not None and not command.overlap:
            syncs.wait_for(command, captured, started_s=under_way.started_s)
