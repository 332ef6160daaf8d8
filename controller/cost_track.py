"""What a sync of one group of servers costs from now on, learned from what it would have cost so far (pure).

The series is c_k, the group's cost per second in second k. Predicted is the cost per second of a sync of d seconds that
starts as second k ends, the mean m of c_k+1 … c_k+d, through its square root, which makes the noise of counts even
(Bartlett 1936):

    √m ≈ w · (√L_0.8, √L_0.4, √L_0.2, √L_0.1, √L_0.05, √L_0.02, q/30, q/5, 1)

L_a is the series smoothed exponentially with factor a, q the seconds since the last cost (up to 30, and up to 5). w is
learned online by discounted ridge regression (`controller.ridge`), which begins with √L_0.4 alone. Many levels at once
tell how a burst goes on: one that has just begun has a high fast level and a low slow one. Squared, the mean of a root
lies under the mean, by a third on bursty traffic: the order of the moments is what counts. The servers' own forecasts
are not among the features: with them 75 % instead of 86 % of the gap to the oracle was closed on the Azure code trace
(mean over four budgets).

Decorrelation time: with r the autocorrelation of √c at a lag of `LAG_S`, discounted over ten minutes, that of a first
order process falls to 1/e within ``-LAG_S / ln r`` seconds, bounded to `SHORTEST_S` … `LONGEST_S`.

A second whose cost is unknown is a gap: nothing is learned across it, and nothing is predicted until the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from controller.recent import SortedWindow
from controller.ridge import Ridge

ALPHAS = (0.8, 0.4, 0.2, 0.1, 0.05, 0.02)
QUIET_S = (30.0, 5.0)
PRIOR = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
DISCOUNT = 0.9997
"""An hour (3,333 s): what traffic does after a burst changes over the day, and not from minute to minute."""
PSEUDO_COUNT = 30.0
SOLVE_EVERY_S = 10
"""The weights move little in between, and solving costs as much as five observations."""
WINDOW_S = 1200
"""Scores that the present one is ranked among: long enough for the rarest moments that a budget waits for."""
MAX_SYNC_S = 60
LAG_S = 5
CORRELATION_DISCOUNT = 1.0 - 1.0 / 600.0
SHORTEST_S, LONGEST_S = 5.0, 12.0


class CostTrack:
    """One group. Memory is constant, 65 kB; a second costs some 20 µs."""

    def __init__(self) -> None:
        self.recent = SortedWindow(WINDOW_S)
        self.expected_per_s: float | None = None
        """Of a sync that starts at the end of the newest second; None after a gap."""
        self._ridge = Ridge(PRIOR, discount=DISCOUNT, pseudo_count=PSEUDO_COUNT)
        self._levels: list[float] | None = None
        self._quiet_s = 0.0
        self._total = 0.0
        self._past: deque[tuple[list[float], float]] = deque(maxlen=MAX_SYNC_S + 1)
        """Features at the end of a second, and the costs until then in total."""
        self._correlation = _Correlation()
        self._num_s = 0

    @property
    def decorrelation_s(self) -> float:
        return self._correlation.decay_s

    def gap(self) -> None:
        """A second whose cost is unknown."""
        self._past.clear()
        self._correlation.gap()
        self.expected_per_s = None

    def observe(self, cost_per_s: float, *, sync_s: float) -> None:
        """One more second; ``sync_s`` is how long a sync takes at present."""
        self._num_s += 1
        self._total += cost_per_s
        self._correlation.observe(math.sqrt(cost_per_s))
        features = self._features(cost_per_s)
        horizon = min(max(round(sync_s), 1), MAX_SYNC_S)
        if len(self._past) >= horizon:
            before, total = self._past[-horizon]
            self._ridge.observe(before, math.sqrt(max(self._total - total, 0.0) / horizon))
            if self._num_s % SOLVE_EVERY_S == 0:
                self._ridge.solve()
        self._past.append((features, self._total))
        root = self._ridge.predict(features)
        self.expected_per_s = math.copysign(root * root, root)
        self.recent.push(self.expected_per_s)

    def _features(self, cost_per_s: float) -> list[float]:
        if self._levels is None:
            self._levels = [cost_per_s] * len(ALPHAS)
        else:
            self._levels = [
                level + alpha * (cost_per_s - level) for level, alpha in zip(self._levels, ALPHAS, strict=True)
            ]
        self._quiet_s = 0.0 if cost_per_s > 0 else self._quiet_s + 1.0
        quiet = [min(self._quiet_s, longest) / longest for longest in QUIET_S]
        return [*map(math.sqrt, self._levels), *quiet, 1.0]


class _Correlation:
    """Autocorrelation at `LAG_S`, with discounted moments."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=LAG_S)
        self._num = self._sum = self._square = self._product = 0.0

    @property
    def decay_s(self) -> float:
        if self._num < LAG_S:
            return SHORTEST_S
        mean = self._sum / self._num
        variance = self._square / self._num - mean * mean
        covariance = self._product / self._num - mean * mean
        if variance <= 0 or covariance <= 0:
            return SHORTEST_S
        if covariance >= variance:
            return LONGEST_S
        return min(max(-LAG_S / math.log(covariance / variance), SHORTEST_S), LONGEST_S)

    def gap(self) -> None:
        self._values.clear()

    def observe(self, value: float) -> None:
        if len(self._values) == LAG_S:
            lagged = self._values[0]
            self._num = CORRELATION_DISCOUNT * self._num + 1.0
            self._sum = CORRELATION_DISCOUNT * self._sum + value
            self._square = CORRELATION_DISCOUNT * self._square + value * value
            self._product = CORRELATION_DISCOUNT * self._product + value * lagged
        self._values.append(value)


def total(costs: Sequence[float | None]) -> float | None:
    """The sum; unknown when one is."""
    known = [cost for cost in costs if cost is not None]
    return math.fsum(known) if len(known) == len(costs) else None
