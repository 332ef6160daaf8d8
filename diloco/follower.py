"""A rank of an island that is not its first: it does what rank 0 says, see `diloco.team`, and reports nothing."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from diloco.inbox import Inbox
from diloco.inner import InnerConfig, InnerLoop
from diloco.phase import PhaseTeller, Waited, waited_at
from diloco.protocol import Event, WorkerConfig
from diloco.pulse import Pulse
from diloco.safepoint import (
    STEPS_TO_SPACE_OUT,
    Safepoint,
    YieldInterrupted,
    hooked,
    layers_of,
    pass_by,
    spaced_out,
)
from diloco.scheduling import become_idle, lower_session
from diloco.team import Action, RankTeam
from diloco.trainer_schema import TrainerPhase
from diloco.vault.contents import HotState
from diloco.vault.guard import Guard
from diloco.vault.restore import start_of
from diloco.vault.resumption import RankState
from diloco.vault.snapshots import Contents
from diloco.worker_build import batches_from
from diloco.workload import Workload
from diloco.workload_loading import build_optimizer, count_tokens, failed_step
from service.errors import WadilocoError

RECENT_STEPS = 32


class Follower:
    """Its model, its part of the slot's data, its share of the optimizer."""

    def __init__(
        self,
        config: WorkerConfig,
        workload: Workload[Any],
        module: nn.Module,
        inner: InnerConfig,
        *,
        team: RankTeam,
        safepoint: Safepoint | None,
        inbox: Inbox,
        emit: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._workload = workload
        self._team = team
        self._safepoint = safepoint
        self._module = module
        optimizer = build_optimizer(workload, self._module, inner)
        self._guard = Guard(config, module, optimizer, team=team, inbox=inbox, emit=emit, collect=self._contents)
        self._chosen = self._guard.choose().chosen
        start = start_of(config, self._chosen)
        self._batches = batches_from(config, workload, step=start.step)
        team.prepare(self._module, optimizer)
        self._inner = InnerLoop(
            self._module,
            inner,
            step=start.step,
            safepoint=safepoint or pass_by,
            loss=workload.loss,
            optimizer=optimizer,
            average=self._average,
        )
        self._inner.skipped = start.skipped
        self._taken: list[Any] = []
        """Batches taken from the stream and not yet trained on."""
        self._running_s: list[float] = []
        """Times of the first steps, without that at the gate."""
        self._has_joined = False
        self._phases = PhaseTeller(config.gate, slot=config.slot, waited=self._waited)
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._pulse = Pulse(
            emit,
            timeout_s=config.failure_timeout_s,
            is_waiting=lambda: self._waited().is_waiting,
            step_time_s=lambda: statistics.median(list(self._recent_s)) if self._recent_s else None,
        )
        self._pulse.start()

    def run(self) -> None:
        """Follow until rank 0 says stop.

        Raises:
            PeerLostError: rank 0 is gone.
            RanksDifferError: the ranks' parameters have come apart.
        """
        self._phases.start()
        try:
            self._team.meet()
            self._restore()
            if self._safepoint is None:
                self._follow()
            else:
                self._follow_between(self._safepoint)
        finally:
            self._pulse.close()
            self._guard.close()
            self._phases.close()
            self._team.close()

    def _restore(self) -> None:
        """Go on from what all ranks have."""
        chosen = self._chosen
        if chosen is not None:
            self._guard.load(chosen)
            self._inner.loss = RankState.of(chosen.generation.state).loss
            self._guard.go_on_from(chosen)

    def _average(self, loss: Tensor) -> Tensor:
        """Gradients of all ranks; from then on parameters change."""
        self._guard.settle()
        return self._team.average(loss)

    def _contents(self, hot: HotState) -> Contents:
        """What a snapshot at this step boundary is of."""
        return Contents(
            step=self._inner.step,
            tokens=0,
            skipped=self._inner.skipped,
            hot=hot.capture(),
            state=RankState(loss=self._inner.loss).model_dump(mode="json", exclude_none=True),
        )

    def _follow_between(self, safepoint: Safepoint) -> None:
        """As rank 0: with safepoints at every layer, and from the first few steps on at as many as are worth it."""
        layers = layers_of(self._module)
        with hooked(layers, safepoint):
            stopped = self._follow(until_steps=STEPS_TO_SPACE_OUT)
        if not stopped:
            step_s = min(self._running_s)
            with hooked(spaced_out(layers, step_s / self._config.accumulation_steps), safepoint):
                self._follow()

    def _follow(self, *, until_steps: float = math.inf) -> bool:
        """Follow until rank 0 says stop, or until so many steps have been taken; says whether it was the former."""
        while len(self._running_s) < until_steps:
            match self._team.hear():
                case Action.STOP:
                    return True
                case Action.STEP:
                    self._phases.enter(TrainerPhase.INNER)
                    self._take_step()
                case Action.PAUSE:
                    self._phases.enter(TrainerPhase.NONE)
                case Action.SYNC:
                    self._phases.enter(TrainerPhase.SYNC)
                    self._team.verify(self._module)
                case Action.SHARE:
                    self._guard.settle()
                    self._team.take_over(self._module)
                    self._join()
                case Action.SNAPSHOT:
                    self._guard.take()
                case Action.KEEP:
                    self._guard.keep()
                case Action.HOLD:
                    pass
        return False

    def _join(self) -> None:
        """The island is part of the run from now on."""
        if not self._has_joined and self._config.idle_priority:
            become_idle()
            lower_session()
        if not self._has_joined and self._chosen is not None:
            self._guard.load_random(self._chosen)
        self._has_joined = True

    def _take_step(self) -> None:
        """One inner step with the other ranks, unless it is given up: then its batches are taken again."""
        started_s, waited_s = time.perf_counter(), self._waited().total_s
        self._pulse.begin_step(self._inner.step)
        self._team.begin_step()
        try:
            if self._safepoint is not None:
                self._safepoint.start_step()
            self._train_on_batches()
        except YieldInterrupted:
            return
        finally:
            self._pulse.end_step()
            if self._safepoint is not None:
                self._safepoint.end_step()
        self._recent_s.append(time.perf_counter() - started_s)
        if len(self._running_s) < STEPS_TO_SPACE_OUT:
            self._running_s.append(time.perf_counter() - started_s - (self._waited().total_s - waited_s))
        self._taken = []
        self._guard.follow_step()

    def _train_on_batches(self) -> None:
        """Take the inner step.

        Raises:
            InputError: the first one fails, in a workload that is not the built-in one.
        """
        try:
            while len(self._taken) < self._config.accumulation_steps:
                self._taken.append(next(self._batches))
            tokens = [count_tokens(self._workload, batch) for batch in self._taken]
            self._team.weigh(sum(tokens))
            self._inner.take_step(*self._taken, tokens=tokens)
        except (WadilocoError, YieldInterrupted):
            raise
        except Exception as exc:
            is_again = self._inner.step == self._config.start_step
            if self._config.workload is None or (self._running_s and not is_again):
                raise
            raise failed_step(exc, step=self._inner.step, is_first=not self._running_s) from exc

    def _waited(self) -> Waited:
        return waited_at(self._safepoint)
