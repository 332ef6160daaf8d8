"""Quantiles from what past forecasts were wrong by, with levels that correct themselves.

The p-quantile is the forecast plus the p'-quantile of the last `MAX_RESIDUALS` residuals, and p' is moved by what was
covered (adaptive conformal inference, Gibbs & Candès 2021):

    p' ← clip(p' + step·(p - [outcome <= quantile that was issued]), p ± `MAX_SHIFT`)

so that p of the outcomes are covered in the long run whatever the series does. Within `MAX_SHIFT` of p: on a series
that is constant all is covered, and the level must not wander off.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

MAX_RESIDUALS = 128
# A 10 % quantile of fewer values is their minimum.
MIN_RESIDUALS = 10
PROBABILITIES = (0.1, 0.5, 0.9)
STEP = 0.01
"""Where every tick has an outcome; where every n-th has, √n times that."""
MAX_SHIFT = 0.3
LEVEL_BOUNDS = tuple((max(p - MAX_SHIFT, 0.005), min(p + MAX_SHIFT, 0.995)) for p in PROBABILITIES)


class Residuals:
    """The residuals of one horizon in one condition of the traffic."""

    __slots__ = ("_newest", "_ordered", "_step", "levels")

    def __init__(
        self,
        residuals: Sequence[float] = (),
        levels: Sequence[float] = PROBABILITIES,
        *,
        interval_ticks: float = 1.0,
    ) -> None:
        self._step = STEP * math.sqrt(interval_ticks)
        self._newest = deque(residuals, maxlen=MAX_RESIDUALS)
        self._ordered = sorted(self._newest)
        self.levels = list(levels)

    @property
    def enough(self) -> bool:
        return len(self._newest) >= MIN_RESIDUALS

    @property
    def newest(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._newest)

    def add(self, residual: float) -> None:
        if len(self._newest) == MAX_RESIDUALS:
            del self._ordered[bisect_left(self._ordered, self._newest[0])]
        self._newest.append(residual)
        insort(self._ordered, residual)

    def correct(self, outcome: float, issued: Sequence[float]) -> None:
        """Move the levels by whether ``outcome`` was within the quantiles that were ``issued``."""
        step = self._step
        for i, (low, high) in enumerate(LEVEL_BOUNDS):
            level = self.levels[i] + step * (PROBABILITIES[i] - (outcome <= issued[i]))
            self.levels[i] = low if level < low else high if level > high else level

    def quantiles(self) -> tuple[float, ...]:
        """The residuals at the corrected `PROBABILITIES`, ascending. At least one residual must be known."""
        low, middle, high = self.levels
        middle = max(low, middle)
        return tuple(quantile(self._ordered, level) for level in (low, middle, max(middle, high)))


def quantile(ordered: list[float], probability: float) -> float:
    """The quantile of ascending values, linear between neighbours (type 7 of Hyndman & Fan)."""
    position = probability * (len(ordered) - 1)
    low = min(int(position), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
