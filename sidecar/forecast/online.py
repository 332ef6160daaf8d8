"""Exponential smoothing with quantiles, online.

The point forecast is that of the best model of `Selection`. Its quantiles are the point plus the quantiles of the
residuals at that horizon, clamped at 0. The regimes:

- *cold start*: nothing is predicted before the first observation. A horizon with too few residuals borrows those of
  the longest shorter horizon that has enough, widened by the root of the ratio of the horizons (errors of a random
  walk); where there is none, the spread is that of a Poisson count, ± 1.28·sqrt(max(point, 1)).
- *irregular ticks*: models advance by elapsed time in units of ``tick_s``; residuals pair by time, not by position.
- *gap*: after `GAP_S` without an observation the level restarts at the new value, without a trend, and predictions
  under way are dropped; errors and residuals so far are kept.
- *reset* of the server's counters: the caller has no value for that interval and observes nothing, a short gap.
- time that stands still or runs backwards: the observation is ignored.
"""

from __future__ import annotations

import math

from sidecar.forecast.base import Prediction
from sidecar.forecast.residuals import Residuals
from sidecar.forecast.selection import Selection

HORIZONS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
PROBABILITIES = (0.1, 0.5, 0.9)
NORMAL_Q90 = 1.2816
GAP_S = 60.0


class SmoothingForecaster:
    """Simple and Holt smoothing on one series. See `sidecar.forecast.base.Forecaster`."""

    def __init__(self, *, tick_s: float, horizons_s: tuple[float, ...] = HORIZONS_S) -> None:
        """``tick_s`` is the usual time between observations; ``horizons_s`` (ascending) keep residuals."""
        self._tick_s = tick_s
        self._selection = Selection()
        self._residuals = tuple(Residuals(horizon_s, tick_s=tick_s) for horizon_s in horizons_s)
        self._last_s: float | None = None
        self._num_observations = 0

    @property
    def method(self) -> str:
        return self._selection.model.method

    @property
    def num_observations(self) -> int:
        return self._num_observations

    def observe(self, value: float, *, now_s: float) -> None:
        if not math.isfinite(value) or (self._last_s is not None and now_s <= self._last_s):
            return
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        if elapsed_s > max(GAP_S, 2 * self._tick_s):
            self._selection.restart(value)
            for residuals in self._residuals:
                residuals.forget_pending()
        else:
            self._selection.observe(value, num_ticks=elapsed_s / self._tick_s)
        self._last_s = now_s
        self._num_observations += 1
        for residuals in self._residuals:
            residuals.settle(value, now_s=now_s)
            residuals.issue(self._point(residuals.horizon_s), now_s=now_s)

    def predict(self, horizon_s: float) -> Prediction | None:
        if self._num_observations == 0:
            return None
        point = self._point(horizon_s)
        q10, q50, q90 = (max(point + error, 0.0) for error in self._spread(horizon_s, point))
        return Prediction(horizon_s=horizon_s, point=point, q10=q10, q50=q50, q90=q90)

    def _point(self, horizon_s: float) -> float:
        return max(self._selection.state.after(horizon_s / self._tick_s), 0.0)

    def _spread(self, horizon_s: float, point: float) -> tuple[float, ...]:
        """What to add to the point for each of `PROBABILITIES`."""
        ready = [residuals for residuals in self._residuals if residuals.enough]
        if not ready:
            spread = NORMAL_Q90 * math.sqrt(max(point, 1.0))
            return -spread, 0.0, spread
        shorter = [residuals for residuals in ready if residuals.horizon_s <= horizon_s]
        source = shorter[-1] if shorter else ready[0]
        widening = math.sqrt(max(horizon_s / source.horizon_s, 1.0))
        return tuple(widening * error for error in source.quantiles(PROBABILITIES))
