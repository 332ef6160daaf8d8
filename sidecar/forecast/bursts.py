"""Bursts at all horizons from one arrival rate: the integral of the rate, and what of it is under way.

Sums over h seconds are differences of that integral, linear between observations. The regimes:

- *cold start*: nothing is said before a horizon has passed once.
- *irregular ticks*: levels advance by the length of the interval that a rate is the mean of.
- *hole*: where intervals do not join (a reset, a scrape that failed for good), sums that would span it are dropped.
- *gap* of more than `GAP_S`: the levels restart at the new rate as well; what was learned is kept.
- time that stands still or runs backwards: the observation is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sidecar.forecast.burst import BurstForecast, BurstTrack, penalties
from sidecar.forecast.dispersion import Dispersion
from sidecar.forecast.experts import ALPHAS
from sidecar.forecast.smoothing import decays, whole
from sidecar.forecast.state import BurstState, check_burst, load_burst, save_burst

GAP_S = 60.0

SeasonalMean = Callable[[float], float | None]
"""What a seasonal model expects on average of the next so many seconds; None when it knows no season."""


def no_season(_: float) -> None:
    """For a series without a seasonal model."""


class BurstForecaster:
    """Learns an arrival rate and says how probable a burst is."""

    def __init__(self, *, tick_s: float, horizons_s: tuple[float, ...]) -> None:
        self._tick_s = tick_s
        self.tracks = tuple(BurstTrack(horizon_s, tick_s=tick_s) for horizon_s in horizons_s)
        self.levels: list[float] = []
        self.dispersion = Dispersion()
        self._arrivals = 0.0
        self._last_s: float | None = None
        self._age_s = 0.0

    def observe(
        self, rate_per_s: float, *, interval_s: float, now_s: float, seasonal_mean: SeasonalMean = no_season
    ) -> None:
        """``rate_per_s`` is the mean over the ``interval_s`` that ended at ``now_s``."""
        if not (math.isfinite(rate_per_s) and rate_per_s >= 0 and interval_s > 0):
            return
        last_s = self._last_s
        if last_s is not None and now_s <= last_s:
            return
        elapsed_s = self._age_s if last_s is None else now_s - last_s
        if not self.levels or elapsed_s > 1.5 * interval_s:
            # What came between the last observation and this interval is not known: no sum over it is.
            self._restart(rate_per_s, far=elapsed_s > max(GAP_S, 2 * self._tick_s))
        weights = decays(ALPHAS, whole(interval_s / self._tick_s))
        self.levels = [
            level + weight * (rate_per_s - level) for weight, level in zip(weights, self.levels, strict=True)
        ]
        arrivals = rate_per_s * interval_s
        self._arrivals += arrivals
        if self.dispersion.add(arrivals, interval_s=interval_s):
            self._expect()
        self._last_s = now_s
        roots = [math.sqrt(level) for level in self.levels]
        for track in self.tracks:
            while track.pending and track.pending[0].target_s <= now_s + 1e-6:
                pending = track.pending.popleft()
                late = rate_per_s * min(now_s - pending.target_s, interval_s)
                track.learn(pending, self._arrivals - late - pending.arrivals)
            if now_s >= track.cadence.next_s:
                known = track.with_seasonal(roots, seasonal_mean(track.horizon_s))
                track.issue(known, self._arrivals, now_s=now_s)

    def predict(self, horizon_s: float, *, seasonal_mean: SeasonalMean = no_season) -> BurstForecast | None:
        """For a horizon that is tracked; None for others, and before a level is known."""
        track = next((track for track in self.tracks if track.horizon_s == horizon_s), None)
        if track is None or track.level.value is None:
            return None
        roots = [math.sqrt(level) for level in self.levels]
        known = track.with_seasonal(roots, seasonal_mean(horizon_s))
        return BurstForecast(track.probability(known), track.burst_level)

    def export(self) -> BurstState:
        """All that was learned; sums under way are not part of it."""
        return save_burst(self.tracks, tick_s=self._tick_s, levels=self.levels, dispersion=self.dispersion)

    def restore(self, state: BurstState, *, age_s: float) -> None:
        """Take over what an earlier process learned until ``age_s`` ago.

        Raises:
            ValueError: it was learned with other models, horizons or ticks.
        """
        check_burst(state, self.tracks, tick_s=self._tick_s)
        self.dispersion = Dispersion(squares=state.dispersion.squares, arrivals=state.dispersion.arrivals)
        self._expect()
        load_burst(state, self.tracks)
        self.levels = list(state.levels)
        self._age_s = max(age_s, 0.0)
        self._last_s = None

    def _restart(self, rate_per_s: float, *, far: bool) -> None:
        if far or not self.levels:
            self.levels = [rate_per_s] * len(ALPHAS)
        self.dispersion.restart()
        for track in self.tracks:
            track.pending.clear()

    def _expect(self) -> None:
        prior = penalties(self.dispersion.allan)
        for track in self.tracks:
            track.expect(prior)
