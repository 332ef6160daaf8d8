"""The inner steps of an island's first rank: its batches, its safepoint, and what each step takes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from diloco.device import catch_up_with, device_of
from diloco.group import PeerLostError
from diloco.inner import InnerLoop
from diloco.parked import Built
from diloco.phase import Waited, waited_at
from diloco.pulse import Pulse
from diloco.safepoint import Safepoint, Yielded, YieldInterrupted, open_gate, pass_by
from diloco.schema import Phase
from diloco.vault.restore import Start
from diloco.worker_build import batches_from, inner_config, patience_of
from diloco.worker_rank import Rank
from diloco.workload_loading import count_tokens, failed_step
from service.errors import WadilocoError

RECENT_STEPS = 32


class Report(Protocol):
    """Tells the agent where the worker is; ``measure`` says whether that may take the work that a norm is."""

    def __call__(self, phase: Phase, *, measure: bool = True) -> None: ...


class Steps:
    """Takes inner steps, and counts them."""

    def __init__(
        self,
        rank: Rank,
        built: Built,
        optimizer: Optimizer,
        start: Start,
        *,
        has_order: Callable[[], bool],
        on_wait: Callable[[], None],
        report: Report,
    ) -> None:
        """``has_order``: a step that waits for the gate is given up; ``report`` comes before a failure."""
        config = rank.config
        self._config = config
        self._workload = built.workload
        self._island = rank.island
        self._team = rank.team
        self._guard = rank.guard
        self._report = report
        self._batches = batches_from(config, self._workload, step=start.step)
        self.safepoint = self._open_safepoint(has_order, on_wait)
        self._team.prepare(built.module, optimizer, has_order=has_order)
        self.inner = InnerLoop(
            built.module,
            inner_config(config),
            step=start.step,
            safepoint=self.safepoint or pass_by,
            loss=self._workload.loss,
            optimizer=optimizer,
            average=self._average,
        )
        self.inner.skipped = start.skipped
        self.tokens = start.tokens
        self._taken: list[Any] = []
        """Batches taken from the stream and not yet trained on."""
        self._step_times_s: list[float] = []
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.running_s: deque[float] = deque(maxlen=RECENT_STEPS)
        """The same without the time at the gate."""
        self.pulse = Pulse(
            rank.emit,
            timeout_s=config.failure_timeout_s,
            is_waiting=lambda: self.waited().is_waiting,
            step_time_s=self.median_s,
        )

    def median_s(self) -> float | None:
        """Of the recent steps; None before the first."""
        return statistics.median(list(self._recent_s)) if self._recent_s else None

    def take_times(self) -> tuple[float, ...]:
        """Of the steps since the last call, in seconds."""
        times, self._step_times_s = tuple(self._step_times_s), []
        return times

    @property
    def yielded(self) -> Yielded | None:
        """What the safepoint's waits have cost; None without one."""
        return self.safepoint.yielded if self.safepoint is not None else None

    def waited(self) -> Waited:
        """What the safepoint's account says."""
        return waited_at(self.safepoint)

    def take(self) -> bool:
        """One inner step, unless an order comes while it waits for the gate: then its batches are taken again.

        Says whether it was taken.
        """
        started_s = time.perf_counter()
        waited_s = self.waited().total_s
        self.pulse.begin_step(self.inner.step)
        self._team.start_step()
        try:
            if self.safepoint is not None:
                self.safepoint.start_step()
            num_tokens = self._train_on_batches()
        except YieldInterrupted:
            self._team.abandon()
            return False
        finally:
            self.pulse.end_step()
            if self.safepoint is not None:
                self.safepoint.end_step()
        self._recent_s.append(time.perf_counter() - started_s)
        self._step_times_s.append(self._recent_s[-1])
        self.running_s.append(self._recent_s[-1] - (self.waited().total_s - waited_s))
        self._taken = []
        self.tokens += num_tokens
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
            return self._team.num_tokens if self.inner.take_step(*self._taken, tokens=tokens) else 0
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
            if not self._recent_s or self.inner.step == self._config.start_step:
                raise failed_step(exc, step=self.inner.step, is_first=not self._recent_s) from exc
            self._report(Phase.INNER)
            raise

    def _average(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of all ranks; from then on parameters change."""
        self._guard.settle()
        return self._team.average(loss)

    def _open_safepoint(self, has_order: Callable[[], bool], on_wait: Callable[[], None]) -> Safepoint | None:
        if self._config.gate is None:
            return None
        return Safepoint(
            open_gate(self._config.gate),
            patience=patience_of(self._config),
            has_order=has_order,
            on_wait=on_wait,
            catch_up=catch_up_with(device_of(self._island.module)),
        )
