"""The rank process of an island: ``python -m diloco.worker``, started and fed by its agent (see `diloco.protocol`).

The main thread takes inner steps, under ``SCHED_IDLE`` where the platform has it; with a gate it waits at safepoints
(see `diloco.safepoint`) while the server beside it has work. At the next step boundary after a
sync command it hands over to the transfer thread, which by default keeps normal priority, and blocks until the round
has closed or the command's deadline has passed; with a command to overlap it only copies its parameters, takes inner
steps while the transfer thread does the sync, and adopts the result at the step boundary after it came. The end of
stdin means that the agent is gone: the worker stops.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

import httpx
import torch
from pydantic import ValidationError
from torch import nn

from diloco.agreement import disagreements
from diloco.boundary import StepBoundary
from diloco.byte_text import ByteText
from diloco.codec import codec_named
from diloco.follower import Follower
from diloco.group import PeerLostError
from diloco.hf_causal_lm import HfCausalLM
from diloco.inbox import Inbox, TransferThread
from diloco.inner import InnerConfig, InnerLoop
from diloco.island import Capture
from diloco.lull import Lulls
from diloco.model import ModelSize, count_parameters
from diloco.phase import PhaseTeller, Waited
from diloco.protocol import (
    Event,
    FailedEvent,
    ProgressEvent,
    ReadyEvent,
    RestoredEvent,
    StandbyEvent,
    SyncCommand,
    SyncedEvent,
    WorkerConfig,
)
from diloco.pulse import Pulse
from diloco.rendezvous import team_of
from diloco.safepoint import (
    STEPS_TO_SPACE_OUT,
    Patience,
    Safepoint,
    YieldInterrupted,
    hooked,
    layers_of,
    open_gate,
    pass_by,
    spaced_out,
)
from diloco.scalars import open_scalars
from diloco.scheduling import become_idle, lower_session, pin_to
from diloco.schema import Phase, Progress, Rung, SyncOutcome, SyncReport
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.team import Action, RankTeam, Team
from diloco.trainer_schema import TrainerPhase
from diloco.transport import SynchronizerClient
from diloco.vault.contents import HotState
from diloco.vault.guard import Guard
from diloco.vault.members import HELD_PER_FRAGMENT, Captured, UnderWay
from diloco.vault.restore import start_of
from diloco.vault.resumption import Resumed, compare, leader_contents, take_over
from diloco.vault.snapshots import Contents
from diloco.workload import Part, Shard, Workload
from diloco.workload_loading import (
    build_checkpointed_module,
    build_module,
    build_optimizer,
    count_tokens,
    fault,
    load_workload,
    open_batches,
)
from service.client import client_options
from service.errors import InputError, UnavailableError, WadilocoError
from service.log import configure_logging
from service.settings import ServiceSettings

# Run as a script, the module's own name is __main__.
logger = logging.getLogger("diloco.worker")

T = TypeVar("T")

REPORT_INTERVAL_S = 0.5
"""Time between two progress events: a restart repeats at most so much, and the norm in it costs under 1 % of it."""
REPORT_WAITING_S = 2.0
"""The same while the server has work: then each report costs it time."""
RECENT_STEPS = 32
JOIN_ATTEMPT_S = 10.0
PAUSED_WAIT_S = 0.5
STOP_POLL_S = 0.2
ABANDON_S = 2.0
"""Time that a transfer has to notice the order to stop."""
COMPARE_S = 1.0
"""For a synchronizer to say where the run is, to a worker that goes on from its own snapshot."""
DUE_POLL_S = 0.02
PIPE = threading.Lock()
"""Of the events: one line at a time."""


@dataclass(frozen=True, slots=True)
class OverlappedSync:
    """A sync that is under way while inner steps go on."""

    command: SyncCommand
    end: Future[SyncReport | None]
    started_s: float
    due_step: int | None = None
    """Inner step at whose boundary the result is adopted; None: as soon as it has come."""


class Worker:
    """One rank: its model, its data, its share in the rounds."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        inbox: Inbox,
        transfers: TransferThread,
        events: TextIO,
        http: httpx.Client,
        team: Team,
    ) -> None:
        self._config = config
        self._inbox = inbox
        self._transfers = transfers
        self._events = events
        self._team = team
        self._workload = open_workload(config)
        module = build_model(self._workload, config)
        self._island = StreamingIsland(module, codec_named(config.codec))
        optimizer = build_optimizer(self._workload, module, inner_config(config))
        self._guard = Guard(
            config,
            module,
            optimizer,
            team=team,
            inbox=inbox,
            emit=self._emit,
            collect=self._contents,
            per_fragment=HELD_PER_FRAGMENT[not self._island.codec.carries_parameters],
        )
        self._choice = self._guard.choose()
        start = start_of(config, self._choice.chosen)
        shard = Shard(slot=config.slot, num_shards=config.data_shards, seed=config.seed)
        part = Part(rank=config.rank, num_ranks=config.num_ranks)
        # As many batches per inner step, skipped ones too: the stream goes on where the slot left it.
        position = start.step * config.accumulation_steps
        self._batches = open_batches(self._workload, shard, part, position=position)
        self._safepoint = self._open_safepoint(config.gate) if config.gate is not None else None
        team.prepare(module, optimizer, has_order=self._has_order)
        self._inner = InnerLoop(
            module,
            inner_config(config),
            step=start.step,
            safepoint=self._safepoint or pass_by,
            loss=self._workload.loss,
            optimizer=optimizer,
            average=self._average,
        )
        self._inner.skipped = start.skipped
        # A reader of its own: the transfer thread asks while the inner loop does.
        lulls = Lulls(open_gate(config.gate), clock=time.monotonic) if config.gate is not None else None
        self._client = SynchronizerClient(http, lulls=lulls)
        self._exchange = StreamingExchange(self._island, self._client, slot=config.slot)
        self._exchange.before_push(self._guard.before_push)
        inbox.on_stop(self._client.cancel)
        self._boundary = StepBoundary(inbox.stop)
        self._tokens = start.tokens
        self._taken: list[Any] = []
        """Batches taken from the stream and not yet trained on."""
        self._update_norm: float | None = None
        self._step_times_s: list[float] = []
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._running_s: deque[float] = deque(maxlen=RECENT_STEPS)
        """The same without the time at the gate."""
        self._loss_at_sync: float | None = None
        self._last_sync_at_s: float | None = None
        self._report_due_s = 0.0
        self._overlapped: OverlappedSync | None = None
        """The sync that is under way while inner steps go on."""
        self._begun: tuple[UnderWay, Captured] | None = None
        """The sync that is under way, and what it contributes, as a snapshot has it."""
        self._epoch = config.vault.epoch if config.vault is not None else 0
        self._lost = ""
        """What could not be restored."""
        self._told: set[str] = set()
        self._scalars = open_scalars(config, lr=lambda: self._inner.lr)
        self._phases = PhaseTeller(config.gate, slot=config.slot, waited=self._waited)
        self._pulse = Pulse(
            self._emit,
            timeout_s=config.failure_timeout_s,
            is_waiting=lambda: self._waited().is_waiting,
            step_time_s=lambda: statistics.median(list(self._recent_s)) if self._recent_s else None,
        )
        self._pulse.start()

    def run(self) -> None:
        """Join the run and train until told to stop."""
        self._report(Phase.STARTING)
        self._phases.start()
        try:
            self._team.meet()
            self._join_and_train()
            self._team.tell(Action.STOP)
        finally:
            self._pulse.close()
            self._guard.close()
            self._phases.close()
            if self._scalars is not None:
                self._scalars.close()
            self._team.close()

    def _join_and_train(self) -> None:
        resumed = self._resume()
        if resumed is None and not self._join():
            return
        self._team.share(self._island.module)
        if resumed is None:
            self._tell_lost_residual()
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
        self._tell_start(resumed)
        if self._config.idle_priority:
            # Not before: under load a start that only gets what is left takes minutes.
            become_idle()
            lower_session()
        if resumed is not None:
            self._go_on(resumed)
        if self._safepoint is None:
            self._train()
        else:
            self._train_between(self._safepoint)
        self._report(Phase.STOPPED)

    def _resume(self) -> Resumed | None:
        """Go on from a snapshot, if there is one and the run is where it can be gone on from; None: join the run."""
        chosen = self._choice.chosen
        if chosen is None:
            return None
        resumed = take_over(chosen, self._island, self._exchange)
        self._guard.load(chosen)
        refused = self._compare(resumed, is_sure=chosen.is_sure and self._vault_is_own)
        if refused is None:
            return None
        under_way = resumed.state.under_way
        if refused and under_way is not None and under_way.fragment in refused:
            resumed = resumed._replace(state=resumed.state.model_copy(update={"under_way": None}))
        if refused:
            self._lost = f"steps since the last sync of fragments {refused}: they may be in the run already"
        self._inner.loss = resumed.state.loss
        self._loss_at_sync, self._last_sync_at_s = resumed.state.loss_at_sync, resumed.state.last_sync_at_s
        self._guard.go_on_from(chosen, contributions=resumed.contributions)
        return resumed

    @property
    def _vault_is_own(self) -> bool:
        return self._config.vault is not None and self._config.vault.is_own

    def _compare(self, resumed: Resumed, *, is_sure: bool) -> list[int] | None:
        """Which fragments start from the global parameters instead; None: told to stop meanwhile."""

        def ask() -> list[int]:
            wait_s = COMPARE_S if is_sure else JOIN_ATTEMPT_S
            return compare(
                resumed,
                self._island,
                self._exchange,
                self._client,
                slot=self._config.slot,
                is_sure=is_sure,
                deadline_s=time.time() + wait_s,
            )

        while not self._inbox.stop.is_set():
            try:
                return self._on_transfer_thread(self._transfers.submit(ask))
            except PeerLostError:
                raise
            except UnavailableError as exc:
                if is_sure:
                    # As if it had gone away a moment later: the next sync finds out what became of the run.
                    logger.warning("no synchronizer, going on without having asked it error=%s", exc)
                    return []
        return None

    def _tell_start(self, resumed: Resumed | None) -> None:
        chosen, now_s = self._choice.chosen, time.time()
        is_restored = resumed is not None and chosen is not None
        rung = Rung.GLOBAL if self._config.start_step else Rung.FRESH
        if is_restored and self._config.vault is not None:
            rung = self._config.vault.rung
        self._emit(
            RestoredEvent(
                rung=rung,
                generation=chosen.generation.number if chosen is not None else None,
                step=self._inner.step,
                refused=tuple(self._choice.refused),
                lost=self._lost,
                begun_s=chosen.begun_s if chosen is not None else now_s,
                fetched_s=chosen.fetched_s if chosen is not None else now_s,
                loaded_s=now_s,
            )
        )
        self._report_due_s = 0.0  # after the first step: until then it has not come back

    def _go_on(self, resumed: Resumed) -> None:
        """Take up a sync that was under way, and then the random numbers, which nothing may draw from meanwhile."""
        under_way = resumed.state.under_way
        if under_way is not None:
            command = under_way.command
            command = command.model_copy(update={"epoch": max(command.epoch, self._epoch)})
            captured = resumed.captured.get(under_way.fragment)
            self._begun = (under_way, Captured(under_way.fragment, captured)) if captured is not None else None
            if command.overlap:
                self._overlap(command, captured, started_s=under_way.started_s, due_step=under_way.due_step)
        chosen = self._choice.chosen
        assert chosen is not None
        self._guard.load_random(chosen)
        if under_way is not None and not command.overlap:
            self._wait_for_sync(command, captured, started_s=under_way.started_s)

    def _train_between(self, safepoint: Safepoint) -> None:
        """Train with safepoints at every layer; from the first few steps on, at as many as their time is worth."""
        layers = layers_of(self._island.module)
        with hooked(layers, safepoint):
            self._train(until_steps=STEPS_TO_SPACE_OUT)
        step_s = min(self._running_s, default=0.0)
        # Between two optimizer steps, the layers are passed once for each batch.
        chosen = spaced_out(layers, step_s / self._config.accumulation_steps)
        logger.info("safepoints layers=%d of=%d step_ms=%.1f", len(chosen), len(layers), 1e3 * step_s)
        with hooked(chosen, safepoint):
            self._train()

    def _train(self, *, until_steps: float = math.inf) -> None:
        """Train until told to stop, or until so many steps have been taken."""
        while not self._inbox.stop.is_set() and len(self._running_s) < until_steps:
            if self._overlapped is not None:
                # One sync at a time: the next order waits for the end of this one, which has a deadline.
                command = None
                self._serve(self._overlapped)
            else:
                command = self._inbox.take_due(time.time(), step=self._inner.step)
            if command is not None:
                self._phases.enter(TrainerPhase.SYNC)
                self._synchronize(command)
            elif self._inbox.paused:
                self._phases.enter(TrainerPhase.NONE)
                self._team.tell(Action.PAUSE)
                self._report(Phase.PAUSED)
                self._inbox.wait(PAUSED_WAIT_S)
            else:
                self._phases.enter(TrainerPhase.INNER)
                if self._take_step():
                    self._guard.after_step(self._inner.step, self._running_s[-1])
                if time.monotonic() >= self._report_due_s:
                    self._report(Phase.INNER)

    def _join(self) -> bool:
        """Wait for the synchronizer, as long as it takes: without global parameters nothing can be contributed."""
        while not self._inbox.stop.is_set():
            try:
                self._on_transfer_thread(self._transfers.submit(self._join_once))
            except PeerLostError:
                raise
            except UnavailableError as exc:
                if not self._inbox.stop.is_set():
                    logger.warning("no synchronizer yet, trying on error=%s", exc)
            else:
                return not self._inbox.stop.is_set()
        return False

    def _tell_lost_residual(self) -> None:
        """Only the worker that encoded knows what the codec left out: the next one of the slot starts without it."""
        if self._island.residual_norm is not None and self._config.start_step > 0:
            logger.warning(
                "what the codec left out of the slot's contributions so far is lost codec=%s step=%d",
                self._config.codec,
                self._config.start_step,
            )

    def _join_once(self) -> None:
        self._exchange.join(deadline_s=time.time() + JOIN_ATTEMPT_S, num_fragments=self._config.num_fragments)

    def _open_safepoint(self, gate: Path) -> Safepoint:
        return Safepoint(
            open_gate(gate),
            patience=patience_of(self._config),
            has_order=self._has_order,
            on_wait=self._report_waiting,
        )

    def _has_order(self) -> bool:
        """Whether a step that waits for the gate is given up."""
        if self._overlapped is None:
            return self._inbox.has_order(time.time(), step=self._inner.step)
        is_due = self._boundary.is_waiting or self._overlapped.end.done()
        return (is_due and self._overlapped.due_step is None) or self._inbox.paused or self._inbox.stop.is_set()

    def _average(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of all ranks; from then on parameters change."""
        self._guard.settle()
        return self._team.average(loss)

    def _contents(self, hot: HotState) -> Contents:
        """What a snapshot at this step boundary is of."""
        begun = self._begun
        more = leader_contents(
            self._island,
            self._exchange,
            captured=begun[1] if begun is not None else None,
            under_way=begun[0] if begun is not None else None,
            loss=self._inner.loss,
            loss_at_sync=self._loss_at_sync,
            last_sync_at_s=self._last_sync_at_s,
        )
        return Contents(
            step=self._inner.step,
            tokens=self._tokens,
            skipped=self._inner.skipped,
            hot=hot.capture(),
            vectors=more.vectors,
            versions=more.versions,
            state=more.state.model_dump(mode="json", exclude_none=True),
            epoch=self._epoch,
        )

    def _take_step(self) -> bool:
        """One inner step, unless an order comes while it waits for the gate: then its batches are taken again.

        Says whether it was taken.
        """
        started_s = time.perf_counter()
        waited_s = self._waited().total_s
        self._pulse.begin_step(self._inner.step)
        self._team.start_step()
        try:
            if self._safepoint is not None:
                self._safepoint.start_step()
            num_tokens = self._train_on_batches()
        except YieldInterrupted:
            self._team.abandon()
            return False
        finally:
            self._pulse.end_step()
            if self._safepoint is not None:
                self._safepoint.end_step()
        self._recent_s.append(time.perf_counter() - started_s)
        self._step_times_s.append(self._recent_s[-1])
        self._running_s.append(self._recent_s[-1] - (self._waited().total_s - waited_s))
        self._taken = []
        self._tokens += num_tokens
        self._island.count_step(num_tokens)
        return True

    def _train_on_batches(self) -> int:
        """Take the inner step; returns the tokens that it was applied to.

        Raises:
            InputError: the first one fails, in a workload that is not the built-in one. After a later one the next
                worker starts with the batch that failed: if it is the batch's fault, that worker finds out.
        """
        try:
            while len(self._taken) < self._config.accumulation_steps:
                self._taken.append(next(self._batches))
            tokens = [count_tokens(self._workload, batch) for batch in self._taken]
            self._team.weigh(sum(tokens))
            return self._team.num_tokens if self._inner.take_step(*self._taken, tokens=tokens) else 0
        except PeerLostError:
            # Where another rank's batch is at fault, the next workers must begin with it to find out.
            self._report(Phase.INNER, measure=False)
            raise
        except (WadilocoError, YieldInterrupted):
            raise
        except Exception as exc:
            if self._config.workload is None:
                raise
            # From a snapshot on, the step at which the worker before met it is not the first.
            if not self._recent_s or self._inner.step == self._config.start_step:
                raise fault(
                    exc, "the first inner step" if not self._recent_s else f"inner step {self._inner.step}, once more,"
                ) from exc
            self._report(Phase.INNER)
            raise

    def _synchronize(self, command: SyncCommand) -> None:
        self._epoch = max(self._epoch, command.epoch)
        if command.overlap:
            self._begin_overlapped(command)
            return
        started_s = time.time()
        self._report(Phase.SYNC)
        captured = self._capture(command, started_s=started_s)
        self._wait_for_sync(command, captured, started_s=started_s)

    def _capture(self, command: SyncCommand, *, started_s: float) -> Capture:
        """Copy what is to be contributed, and have a snapshot know of it before it travels."""
        self._guard.settle()
        self._team.start_sync(self._island.module)
        captured = self._exchange.capture(command)
        fragment = self._exchange.turn_of(command)
        due_step = None if command.overlap_steps is None else self._inner.step + command.overlap_steps
        under_way = UnderWay(command=command, fragment=fragment, started_s=started_s, due_step=due_step)
        self._begun = (under_way, Captured(fragment, captured))
        self._guard.before_sync()
        return captured

    def _wait_for_sync(self, command: SyncCommand, captured: Capture | None, *, started_s: float) -> None:
        """The sync, while inner steps stand still."""
        self._guard.settle()
        done = self._on_transfer_thread(self._transfers.submit(lambda: self._exchange.run(command, captured=captured)))
        self._share()
        # As the inner loop saw it, with the time that an idle thread waits for its core.
        times = {"started_s": started_s, "finished_s": time.time()}
        self._end_sync(command, done.model_copy(update=times) if done is not None else None, now_s=started_s)
        self._report(Phase.INNER)

    def _begin_overlapped(self, command: SyncCommand) -> None:
        """Copy the parameters, and leave the rest to the transfer thread."""
        started_s, boundary = time.time(), self._boundary
        boundary.blocked_s = 0.0
        # The others only see that they hold what is captured; what is adopted later they get when it is.
        captured = boundary.time(lambda: self._capture(command, started_s=started_s))
        due_step = None if command.overlap_steps is None else self._inner.step + command.overlap_steps
        self._overlap(command, captured, started_s=started_s, due_step=due_step)

    def _overlap(
        self, command: SyncCommand, captured: Capture | None, *, started_s: float, due_step: int | None
    ) -> None:
        boundary = self._boundary
        end = self._transfers.submit(lambda: self._exchange.run(command, captured=captured, at_boundary=boundary))
        self._overlapped = OverlappedSync(command, end, started_s=started_s, due_step=due_step)

    def _serve(self, sync: OverlappedSync) -> None:
        """Do what the sync needs a step boundary for, such as to adopt its result, and report it when it has ended."""
        if sync.due_step is not None:
            if self._inner.step < sync.due_step:
                return
            self._wait_until_due(sync)
        if self._boundary.is_waiting:
            self._adopt_at_boundary()
        if not sync.end.done():
            return
        self._overlapped = None
        report = sync.end.result()
        times = {"started_s": sync.started_s, "blocked_s": self._boundary.blocked_s}
        self._end_sync(
            sync.command, report.model_copy(update=times) if report is not None else None, now_s=sync.started_s
        )
        self._report_due_s = 0.0  # after the next step: what a report takes is not the sync's

    def _wait_until_due(self, sync: OverlappedSync) -> None:
        """The step at which the result is adopted has come: wait for it."""
        while not sync.end.done() and not self._inbox.stop.is_set():
            if self._boundary.is_waiting:
                self._adopt_at_boundary()
            elif not wait([sync.end], timeout=DUE_POLL_S).done:
                self._team.tell(Action.HOLD)

    def _adopt_at_boundary(self) -> None:
        self._phases.enter(TrainerPhase.SYNC)
        self._guard.settle()
        self._boundary.serve()
        self._boundary.time(self._share)

    def _end_sync(self, command: SyncCommand, report: SyncReport | None, *, now_s: float) -> None:
        self._begun = None
        self._guard.after_sync()
        self._tell_disagreements(command, now_s=now_s)
        if report is None:
            logger.info("sync skipped, nothing to do round=%s version=%d", command.round, self._island.version)
        else:
            self._note_sync(report)

    def _share(self) -> None:
        """After a sync all ranks go on from the same parameters."""
        # A transfer that was given up at a stop may still be at work on them.
        if not self._inbox.stop.is_set():
            self._guard.settle()
            self._team.share(self._island.module)

    def _note_sync(self, report: SyncReport) -> None:
        if report.outcome is not SyncOutcome.FAILED:
            self._last_sync_at_s = report.finished_s
            self._loss_at_sync = self._inner.loss
        self._emit(SyncedEvent(report=report))

    def _tell_disagreements(self, command: SyncCommand, *, now_s: float) -> None:
        """Say once what the synchronizer's settings make of the orders that come from elsewhere."""
        if self._exchange.outer_state is None:
            return
        for sentence in disagreements(command, self._exchange.outer_state, now_s=now_s):
            key = sentence.partition(":")[0]
            if key not in self._told:
                self._told.add(key)
                logger.warning("%s", sentence)

    def _on_transfer_thread(self, future: Future[T]) -> T | None:
        """The result of a call; None when it does not end in time after the order to stop."""
        while not self._inbox.stop.is_set():
            if wait([future], timeout=STOP_POLL_S).done:
                return future.result()
            self._team.tell(Action.HOLD)
        return future.result() if wait([future], timeout=ABANDON_S).done else None

    def _waited(self) -> Waited:
        """What the safepoint's account says."""
        if self._safepoint is None:
            return Waited()
        yielded = self._safepoint.yielded
        return Waited(yielded.total_s, is_waiting=yielded.reason is not None)

    def _report_waiting(self) -> None:
        """Say now and then that the worker waits, without the work that a norm is."""
        self._team.wait_on()
        if time.monotonic() >= self._report_due_s:
            self._report(Phase.INNER, measure=False)
            self._report_due_s += REPORT_WAITING_S - REPORT_INTERVAL_S

    def _report(self, phase: Phase, *, measure: bool = True) -> None:
        island = self._island
        if measure:
            update_norm = island.update_norm()
            self._update_norm = update_norm if math.isfinite(update_norm) else None
        yielded = self._safepoint.yielded if self._safepoint is not None else None
        progress = Progress(
            step=self._inner.step,
            inner_steps_since_sync=island.steps_since_sync,
            tokens=self._tokens,
            tokens_since_sync=island.tokens_since_sync,
            loss=self._inner.loss,
            loss_at_sync=self._loss_at_sync,
            update_norm=self._update_norm,
            residual_norm=island.residual_norm,
            step_time_s=statistics.median(self._recent_s) if self._recent_s else None,
            round=island.version,
            phase=phase,
            last_sync_at_s=self._last_sync_at_s,
            skipped_steps=self._inner.skipped,
            yielded_s=yielded.total_s if yielded else None,
            yield_reason=yielded.reason if yielded else None,
            abandoned_steps=yielded.abandoned_steps if yielded else 0,
        )
        times, self._step_times_s = tuple(self._step_times_s), []
        self._emit(ProgressEvent(progress=progress, step_times_s=times))
        self._report_due_s = time.monotonic() + REPORT_INTERVAL_S

    def _emit(self, event: Event) -> None:
        emit(self._events, event, self._inbox)
        if self._scalars is not None:
            self._scalars.take(event)


def emit(events: TextIO, event: Event, inbox: Inbox) -> None:
    """Say something to the agent; from any thread."""
    try:
        with PIPE:
            events.write(event.model_dump_json() + "\n")
            events.flush()
    except BrokenPipeError:
        inbox.request_stop()


def model_size(config: WorkerConfig) -> ModelSize:
    return ModelSize(
        num_layers=config.num_layers, num_heads=config.num_heads, width=config.width, context=config.context
    )


def patience_of(config: WorkerConfig) -> Patience:
    return Patience(patience_s=config.gate_patience_s, trickle_s=config.gate_trickle_s)


def inner_config(config: WorkerConfig) -> InnerConfig:
    """The settings of the inner loop, by their names."""
    return InnerConfig(**config.model_dump(include={field.name for field in fields(InnerConfig)} - {"betas"}))


def open_workload(config: WorkerConfig) -> Workload[Any]:
    """What the rank trains: the researcher's own, a Hugging Face model, or the byte GPT."""
    if config.workload is not None:
        return load_workload(config.workload, config.workload_options)
    if config.hf_model is not None:
        return HfCausalLM(config.hf_model, data=config.data, context=config.context, batch_size=config.batch_size)
    return ByteText(model_size(config), data=config.data, batch_size=config.batch_size)


def build_model(workload: Workload[Any], config: WorkerConfig) -> nn.Module:
    """The model as it is trained.

    Raises:
        InputError: it cannot be built.
    """
    build = build_checkpointed_module if config.activation_checkpointing else build_module
    return build(workload, seed=config.seed)


def open_client(config: WorkerConfig) -> httpx.Client:
    settings = ServiceSettings(
        token=config.token, tls_ca=config.tls_ca, tls_cert=config.tls_cert, tls_key=config.tls_key
    )
    return httpx.Client(**client_options(settings, config.synchronizer_url, timeout_s=config.timeout_s))


def lead(config: WorkerConfig, team: Team, inbox: Inbox, events: TextIO) -> None:
    """Train as the first rank, which may be the only one."""
    transfers = TransferThread(idle=config.sync_priority == "idle")
    with open_client(config) as http:
        Worker(config, inbox=inbox, transfers=transfers, events=events, http=http, team=team).run()


def follow(config: WorkerConfig, team: RankTeam, inbox: Inbox, events: TextIO) -> None:
    """Train as one of the other ranks."""
    safepoint = None
    if config.gate is not None:
        safepoint = Safepoint(open_gate(config.gate), patience=patience_of(config), on_wait=team.wait_on)
    workload = open_workload(config)
    module = build_model(workload, config)

    def say(event: Event) -> None:
        emit(events, event, inbox)

    Follower(
        config, workload, module, inner_config(config), team=team, safepoint=safepoint, inbox=inbox, emit=say
    ).run()


def warm_up() -> None:
    """One step of a tiny model: what torch loads at its first is loaded then."""
    module = nn.Linear(2, 2)
    inner = InnerLoop(module, InnerConfig(), loss=lambda model, batch: model(batch).square().mean())
    inner.take_step(torch.ones(2, 2))


def main(*, is_standby: bool = False) -> int:
    """Read the configuration from stdin, train until told to stop; returns the exit code."""
    events = take_stdout()
    inbox = Inbox()
    if is_standby:
        emit(events, StandbyEvent(), inbox)
    signal.signal(signal.SIGTERM, lambda *_: inbox.request_stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.readline()
    if is_standby and not line:
        return 0  # the agent is gone, and had no use for it
    try:
        config = WorkerConfig.model_validate_json(line)
    except ValidationError as exc:
        emit(events, FailedEvent(message=f"worker configuration: {exc}", exit_code=InputError.exit_code), inbox)
        return InputError.exit_code
    configure_logging(config.log_level)
    pin_to(config.cores)
    torch.set_num_threads(config.threads)
    inbox.listen(sys.stdin)
    try:
        if config.num_ranks == 1:
            lead(config, Team(), inbox, events)
        else:
            with team_of(config, cancelled=inbox.stop) as team:
                if config.rank == 0:
                    lead(config, team, inbox, events)
                else:
                    follow(config, team, inbox, events)
    except WadilocoError as exc:
        if inbox.stop.is_set() and isinstance(exc, UnavailableError):
            logger.info("stopped while it waited error=%s", exc)
            return 0
        emit(events, FailedEvent(message=str(exc), exit_code=exc.exit_code), inbox)
        return exc.exit_code
    except Exception as exc:
        logger.exception("worker crashed")
        emit(events, FailedEvent(message=f"{type(exc).__name__}: {exc}", exit_code=1), inbox)
        return 1
    return 0


def take_stdout() -> TextIO:
    """The event pipe, which was stdout. Stdout itself is stderr from now on, so that no library can write events."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


if __name__ == "__main__":
    # Taking down the interpreter under SCHED_IDLE can take seconds on a busy core, and there is nothing left to save.
    os._exit(main())
