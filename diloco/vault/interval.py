"""How many inner steps lie between two snapshots: as few as cost at most a hundredth of the time (pure).

A snapshot costs what the step waits for it (capturing, and the end of the copy), and the processor time of the copy as
far as the step lacked it. With c the cost of one and t the time of a step, every k-th step costs c / (k·t) of the time,
so k = ceil(c / (budget·t)). Both are medians of the last few, so that one hiccup moves nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

BUDGET = 0.01
MAX_INTERVAL = 64
"""A worker that dies computes so many steps again at most, whatever a snapshot costs."""
RECENT = 9
HYSTERESIS = 0.8
"""A shorter interval must be affordable with so much of the budget: otherwise it would go back and forth."""


@dataclass(slots=True)
class Interval:
    """The interval, and what it was chosen by."""

    steps: int = 1
    _costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def take_step(self, step_s: float) -> None:
        """A step took so long, without the time at the gate and without what snapshots cost."""
        self._steps_s.append(step_s)

    def take_cost(self, cost_s: float) -> bool:
        """A snapshot cost so much; says whether the interval is another one now."""
        self._costs_s.append(max(cost_s, 0.0))
        before, self.steps = self.steps, self._chosen()
        return self.steps != before

    @property
    def overhead(self) -> float | None:
        """The share of the time that snapshots cost at this interval; None while it is unknown."""
        if not self._costs_s or not self._steps_s:
            return None
        return statistics.median(self._costs_s) / (self.steps * max(statistics.median(self._steps_s), 1e-9))

    def _chosen(self) -> int:
        if not self._steps_s:
            return self.steps
        ratio = statistics.median(self._costs_s) / max(statistics.median(self._steps_s), 1e-9)
        wanted = min(max(math.ceil(ratio / BUDGET), 1), MAX_INTERVAL)
        if wanted >= self.steps:
            return wanted
        shorter = min(max(math.ceil(ratio / (BUDGET * HYSTERESIS)), 1), MAX_INTERVAL)
        return min(shorter, self.steps)
