"""What the first rank tells its agent of its progress, and when."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from diloco.device import NormDue, device_of
from diloco.protocol import ProgressEvent
from diloco.schema import Phase, Progress
from diloco.worker_rank import Rank
from diloco.worker_steps import Steps

REPORT_INTERVAL_S = 0.5
"""Time between two progress events: a restart repeats at most so much, and the norm in it costs under 1 % of it."""
REPORT_WAITING_S = 2.0
"""The same while the server has work: then each report costs it time."""


@dataclass(frozen=True, slots=True)
class LastSync:
    """The last sync that did not fail."""

    at_s: float | None = None
    """Unix time of its end."""
    loss: float | None = None


class Reports:
    """The progress events of one worker. The thread of the inner loop alone uses it."""

    def __init__(self, rank: Rank, steps: Steps) -> None:
        self._island = rank.island
        self._emit = rank.emit
        self._steps = steps
        self.last_sync = LastSync()
        self._update_norm: float | None = None
        self._norm_due = NormDue(device_of(rank.island.module))
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s

    @property
    def is_urgent(self) -> bool:
        """Whether one has been asked for (`make_due`) that has not come."""
        return self._due_s <= 0.0

    def make_due(self) -> None:
        """Report after the next step."""
        self._due_s = 0.0

    def tell(self, phase: Phase, *, measure: bool = True) -> None:
        """Say where the worker is; ``measure`` says whether the work that a norm is may be done for it."""
        island, steps = self._island, self._steps
        if measure and self._norm_due.take(time.monotonic()):
            update_norm = island.update_norm()
            self._update_norm = update_norm if math.isfinite(update_norm) else None
        yielded = steps.yielded
        progress = Progress(
            step=steps.inner.step,
            inner_steps_since_sync=island.steps_since_sync,
            tokens=steps.tokens,
            tokens_since_sync=island.tokens_since_sync,
            loss=steps.inner.loss,
            loss_at_sync=self.last_sync.loss,
            update_norm=self._update_norm,
            residual_norm=island.residual_norm,
            step_time_s=steps.median_s(),
            round=island.version,
            phase=phase,
            last_sync_at_s=self.last_sync.at_s,
            skipped_steps=steps.inner.skipped,
            yielded_s=yielded.total_s if yielded else None,
            yield_reason=yielded.reason if yielded else None,
            abandoned_steps=yielded.abandoned_steps if yielded else 0,
        )
        self._emit(ProgressEvent(progress=progress, step_times_s=steps.take_times()))
        self._due_s = time.monotonic() + REPORT_INTERVAL_S

    def tell_waiting(self) -> None:
        """Say now and then that the worker waits, without the work that a norm is."""
        if self.is_due:
            self.tell(Phase.INNER, measure=False)
            self._due_s += REPORT_WAITING_S - REPORT_INTERVAL_S
