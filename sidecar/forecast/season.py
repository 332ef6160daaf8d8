"""Find the season of a series from its autocorrelation, a little at every tick.

The last `WINDOW_TICKS` values are frozen, their autocorrelation r_k is computed for one lag k every `TICKS_PER_LAG`
ticks, k = 1 … `MAX_SEASON_TICKS`; then the next sweep begins. A lag is a candidate when

- r_k is a local maximum and at least `MIN_CORRELATION` (white noise stays under 2/√N ≈ 0.11), and
- r fell to under half of r_k at some shorter lag: what decays from lag 0 on is persistence and not a season.

The smallest candidate within `NEAR_BEST` of the best is the season (a multiple of the season correlates as well),
centred between the flanks of its peak, which must be in sight (seasons up to about 100 ticks). It is believed once
`CONFIRMATIONS` sweeps in a row agree on it, and lost after as many without a candidate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import mul

MAX_SEASON_TICKS = 120
WINDOW_TICKS = 360
"""Three of the longest seasons."""
TICKS_PER_LAG = 3
"""Twice that while a season is known: Holt-Winters takes its share of the time."""
MIN_CORRELATION = 0.3
NEAR_BEST = 0.9
MIN_SEASON_TICKS = 4
CONFIRMATIONS = 2


class SeasonFinder:
    """The sweep over one series. `season_ticks` is the season that is known now, or None."""

    def __init__(self) -> None:
        self.season_ticks: int | None = None
        self._values: deque[float] = deque(maxlen=WINDOW_TICKS)
        self._frozen: list[float] = []
        self._correlations: list[float] = []
        self._variance = 0.0
        self._countdown = TICKS_PER_LAG
        self._candidate: int | None = None
        self._num_agreeing = 0

    @property
    def window(self) -> list[float]:
        """The newest values, oldest first, one per tick."""
        return list(self._values)

    def observe(self, value: float, *, num_ticks: float) -> bool:
        """One more value; True when `season_ticks` changed."""
        # A longer tick is that many ticks of its mean; shorter ones are sampled.
        for _ in range(min(int(num_ticks + 0.5), WINDOW_TICKS)):
            self._values.append(value)
        self._countdown -= 1
        if self._countdown or len(self._values) < WINDOW_TICKS:
            self._countdown = self._countdown or 1
            return False
        self._countdown = TICKS_PER_LAG if self.season_ticks is None else 2 * TICKS_PER_LAG
        return self._advance()

    def restart(self) -> None:
        """A gap: the values before it are not in step with those after it. The season is kept."""
        self._values.clear()
        self._frozen = []
        self._correlations = []

    def _advance(self) -> bool:
        if not self._frozen:
            mean = sum(self._values) / len(self._values)
            self._frozen = [value - mean for value in self._values]
            self._variance = sum(map(mul, self._frozen, self._frozen))
            return False
        lag = len(self._correlations) + 1
        product = sum(map(mul, self._frozen[lag:], self._frozen))
        share = (WINDOW_TICKS - lag) / WINDOW_TICKS
        self._correlations.append(product / (share * self._variance) if self._variance > 0 else 0.0)
        if lag < MAX_SEASON_TICKS:
            return False
        found = find_season(self._correlations)
        self._frozen, self._correlations = [], []
        return self._conclude(found)

    def _conclude(self, found: int | None) -> bool:
        before, self._candidate = self._candidate, found
        # A first season may be wrong by a tick, which costs little; it is replaced only by one that is found twice.
        agrees = found == before or (self.season_ticks is None and found and before and abs(found - before) <= 1)
        self._num_agreeing = self._num_agreeing + 1 if agrees else 1
        if self._num_agreeing < CONFIRMATIONS or found == self.season_ticks:
            return False
        self.season_ticks = found
        return True


def find_season(correlations: Sequence[float]) -> int | None:
    """The season in an autocorrelation of lags 1, 2, …; None when it shows none."""
    candidates = []
    lowest = 1.0
    for lag in range(2, len(correlations)):
        before, here, after = correlations[lag - 2 : lag + 1]
        lowest = min(lowest, before)
        if lag >= MIN_SEASON_TICKS and here >= MIN_CORRELATION and before < here >= after and lowest < here / 2:
            candidates.append((lag, here))
    if not candidates:
        return None
    best = max(here for _, here in candidates)
    first = next(lag for lag, here in candidates if here >= NEAR_BEST * best)
    centre = _middle(correlations, first)
    if centre is None or 2 * centre > len(correlations):
        return centre
    return max(range(centre - 1, centre + 2), key=lambda lag: _at_multiples(correlations, lag))


def _middle(correlations: Sequence[float], peak: int) -> int | None:
    """Half way between where the correlation falls to half of its ``peak``, left and right of it.

    The flanks are steep where the top of a smooth season is flat and noisy. None when one of them is out of sight.
    """
    half = correlations[peak - 1] / 2
    left = next((lag for lag in range(peak, 0, -1) if correlations[lag - 1] < half), None)
    right = next((lag for lag in range(peak, len(correlations) + 1) if correlations[lag - 1] < half), None)
    return None if left is None or right is None else (left + right) // 2


def _at_multiples(correlations: Sequence[float], lag: int) -> float:
    """Mean correlation at the multiples of a season, where an error of a tick shows several times over."""
    multiples = correlations[lag - 1 :: lag]
    return sum(multiples) / len(multiples)
