"""The first rank of an island, which may be the only one: it joins the run, trains, and does what the agent orders.

Its parts: `diloco.worker_joining`, `diloco.worker_steps`, `diloco.worker_syncs` and `diloco.worker_reports`.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TextIO

from diloco.inbox import Inbox, TransferThread
from diloco.model import count_parameters
from diloco.parked import Built
from diloco.phase import PhaseTeller
from diloco.protocol import Event, ReadyEvent, WorkerConfig
from diloco.safepoint import STEPS_TO_SPACE_OUT, Safepoint, hooked, layers_of, spaced_out
from diloco.scalars import open_scalars
from diloco.scheduling import become_idle, lower_session
from diloco.schema import Phase
from diloco.shards import Shards
from diloco.streaming import StreamingExchange
from diloco.team import Action, Team
from diloco.trainer_schema import TrainerPhase
from diloco.vault.contents import HotState
from diloco.vault.guard import Guard
from diloco.vault.members import HELD_PER_FRAGMENT
from diloco.vault.restore import start_of
from diloco.vault.resumption import leader_contents
from diloco.vault.snapshots import Contents
from diloco.worker_build import build, inner_config, rank_device
from diloco.worker_events import emit
from diloco.worker_joining import Resumption, join_run, tell_lost_residual
from diloco.worker_rank import Rank, Transfers
from diloco.worker_reports import Reports
from diloco.worker_steps import Steps
from diloco.worker_syncs import WorkerSyncs
from diloco.workload_loading import build_optimizer

logger = logging.getLogger("diloco.worker")

PAUSED_WAIT_S = 0.5


class Worker:
    """One rank: its model, its data, its share in the rounds."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        inbox: Inbox,
        transfers: TransferThread,
        events: TextIO,
        shards: Shards,
        team: Team,
        built: Built | None = None,
    ) -> None:
        """``built``: what there is already of it."""
        self._config = config
        self._inbox = inbox
        self._events = events
        self._team = team
        self._built = built = built or build(config)
        self._island = built.island
        built.module.to(rank_device(config))
        optimizer = build_optimizer(built.workload, built.module, inner_config(config))
        self._guard = Guard(
            config,
            built.module,
            optimizer,
            team=team,
            inbox=inbox,
            emit=self._emit,
            collect=self._contents,
            per_fragment=HELD_PER_FRAGMENT[not self._island.codec.carries_parameters],
        )
        choice = self._guard.choose()
        self._rank = Rank(
            config=config,
            island=self._island,
            exchange=StreamingExchange(self._island, shards, slot=config.slot),
            shards=shards,
            team=team,
            guard=self._guard,
            inbox=inbox,
            transfers=Transfers(transfers, inbox=inbox, team=team),
            emit=self._emit,
        )
        self._steps = Steps(
            self._rank,
            built,
            optimizer,
            start_of(config, choice.chosen),
            has_order=lambda: self._syncs.has_order(),
            on_wait=self._wait_on,
            report=self._report,
        )
        self._rank.exchange.before_push(self._guard.before_push)
        inbox.on_stop(shards.cancel)
        self._scalars = open_scalars(config, lr=lambda: self._steps.inner.lr)
        self._phases = PhaseTeller(config.gate, slot=config.slot, waited=self._steps.waited)
        self._reports = Reports(self._rank, self._steps)
        self._syncs = WorkerSyncs(self._rank, self._steps, self._reports, self._phases)
        self._resumption = Resumption(self._rank, choice, self._steps, self._reports, self._syncs)
        self._steps.pulse.start()

    def run(self) -> None:
        """Join the run and train until told to stop."""
        self._report(Phase.STARTING, measure=False)
        self._phases.start()
        try:
            self._team.meet()
            self._join_and_train()
            self._team.tell(Action.STOP)
        finally:
            self._steps.pulse.close()
            self._guard.close()
            self._phases.close()
            if self._scalars is not None:
                self._scalars.close()
            self._team.close()

    def _join_and_train(self) -> None:
        resumed = self._resumption.resume()
        if resumed is None and not join_run(self._rank, holds=self._built.holds):
            return
        self._team.share(self._island.module)
        if resumed is None:
            tell_lost_residual(self._rank)
        parameters = count_parameters(self._island.module)
        island = self._island
        self._emit(
            ReadyEvent(
                num_parameters=parameters,
                version=island.version,
                num_fragments=island.num_fragments,
                resumes_sync=resumed is not None and resumed.state.under_way is not None,
            )
        )
        self._resumption.tell_start(resumed)
        if self._config.idle_priority:
            # Not before: under load a start that only gets what is left takes minutes.
            become_idle()
            lower_session()
        if resumed is not None:
            self._resumption.go_on(resumed)
        if self._steps.safepoint is None:
            self._train()
        else:
            self._train_between(self._steps.safepoint)
        self._report(Phase.STOPPED)

    def _train_between(self, safepoint: Safepoint) -> None:
        """Train with safepoints at every layer; from the first few steps on, at as many as their time is worth."""
        layers = layers_of(self._island.module)
        with hooked(layers, safepoint):
            self._train(until_steps=STEPS_TO_SPACE_OUT)
        step_s = min(self._steps.running_s, default=0.0)
        # Between two optimizer steps, the layers are passed once for each batch.
        chosen = spaced_out(layers, step_s / self._config.accumulation_steps)
        logger.info("safepoints layers=%d of=%d step_ms=%.1f", len(chosen), len(layers), 1e3 * step_s)
        with hooked(chosen, safepoint):
            self._train()

    def _train(self, *, until_steps: float = math.inf) -> None:
        """Train until told to stop, or until so many steps have been taken."""
        steps, syncs = self._steps, self._syncs
        while not self._inbox.stop.is_set() and len(steps.running_s) < until_steps:
            if syncs.overlapped is not None:
                # One sync at a time: the next order waits for the end of this one, which has a deadline.
                command = None
                syncs.serve(syncs.overlapped)
            else:
                command = self._inbox.take_due(time.time(), step=steps.inner.step)
            if command is not None:
                self._phases.enter(TrainerPhase.SYNC)
                syncs.synchronize(command)
            elif self._inbox.paused:
                self._pause()
            else:
                self._phases.enter(TrainerPhase.INNER)
                if steps.take():
                    self._guard.after_step(steps.inner.step, steps.running_s[-1])
                if self._reports.is_due:
                    # One that is urgent does not wait for the norm, which the next one has.
                    self._report(Phase.INNER, measure=not self._reports.is_urgent)

    def _pause(self) -> None:
        self._phases.enter(TrainerPhase.NONE)
        if self._inbox.wants_snapshot():
            self._guard.take_now()
        self._team.tell(Action.PAUSE)
        self._report(Phase.PAUSED)
        self._inbox.wait(PAUSED_WAIT_S)

    def _wait_on(self) -> None:
        """A step waits for the gate."""
        self._team.wait_on()
        self._reports.tell_waiting()

    def _report(self, phase: Phase, *, measure: bool = True) -> None:
        self._reports.tell(phase, measure=measure)

    def _contents(self, hot: HotState) -> Contents:
        """What a snapshot at this step boundary is of."""
        steps, syncs, last_sync = self._steps, self._syncs, self._reports.last_sync
        more = leader_contents(
            self._island,
            self._rank.exchange,
            captured=syncs.begun[1] if syncs.begun is not None else None,
            under_way=syncs.begun[0] if syncs.begun is not None else None,
            loss=steps.inner.loss,
            loss_at_sync=last_sync.loss,
            last_sync_at_s=last_sync.at_s,
        )
        return Contents(
            step=steps.inner.step,
            tokens=steps.tokens,
            skipped=steps.inner.skipped,
            hot=hot.capture(),
            vectors=more.vectors,
            versions=more.versions,
            state=more.state.model_dump(mode="json", exclude_none=True),
            epoch=syncs.epoch,
        )

    def _emit(self, event: Event) -> None:
        emit(self._events, event, self._inbox)
        if self._scalars is not None:
            self._scalars.take(event)
