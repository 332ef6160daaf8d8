"""The automatic forecaster of one series: several smoothing models, blended per horizon, with quantiles, online.

The models are those of `sidecar.forecast.experts`; each horizon has a `Track` that weighs them by their errors at that
horizon and keeps the residuals. A horizon without a track of its own uses the next longer one. The regimes:

- *cold start*: nothing is predicted before the first observation. A horizon with too few residuals borrows those of
  the longest shorter horizon that has enough, widened by the root of the ratio of the horizons (errors of a random
  walk); where there is none, the spread is that of a Poisson count, ± 1.28·sqrt(max(point, 1)).
- *irregular ticks*: models advance by elapsed time in units of ``tick_s``; residuals pair by time, not by position.
- *gap*: after `GAP_S` without an observation the levels restart at the new value, without trend or season, and
  predictions under way are dropped; weights and residuals so far are kept.
- *reset* of the server's counters: the caller has no value for that interval and observes nothing, a short gap.
- *restart* of this process: what `export` gave goes to `restore`, with the age of the last observation; predictions
  under way are dropped, and the time away counts as a tick or a gap of that length.
- time that stands still or runs backwards: the observation is ignored.
"""

from __future__ import annotations

import math

from sidecar.forecast.base import Prediction
from sidecar.forecast.experts import METHODS, Experts, trend_reaches
from sidecar.forecast.smoothing import whole
from sidecar.forecast.state import ForecasterState, load_forecaster, save_forecaster
from sidecar.forecast.track import NORMAL_Q90, Track

HORIZONS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)
GAP_S = 60.0


class SmoothingForecaster:
    """See `sidecar.forecast.base.Forecaster`."""

    def __init__(self, *, tick_s: float, horizons_s: tuple[float, ...] = HORIZONS_S) -> None:
        """``tick_s`` is the usual time between observations; ``horizons_s`` (ascending) have tracks."""
        self._tick_s = tick_s
        self._experts = Experts()
        self._tracks = tuple(Track(horizon_s, tick_s=tick_s) for horizon_s in horizons_s)
        self._last_s: float | None = None
        self._age_s = 0.0
        self._num_observations = 0

    @property
    def num_observations(self) -> int:
        return self._num_observations

    @property
    def season_s(self) -> float | None:
        """The season that Holt-Winters works with, None while none was found."""
        season_ticks = self._experts.season_ticks
        return None if season_ticks is None else season_ticks * self._tick_s

    def seasonal_mean(self, horizon_s: float) -> float | None:
        """What Holt-Winters expects on average of the next ``horizon_s``; None without a season."""
        return self._experts.seasonal_mean(horizon_s / self._tick_s)

    def method(self, horizon_s: float) -> str:
        """The kind of model that counts most at ``horizon_s``."""
        weights: dict[str, float] = {}
        for name, weight in zip(METHODS, self._track(horizon_s).blend.weights, strict=False):
            weights[name] = weights.get(name, 0.0) + weight
        return max(weights, key=weights.__getitem__)

    def observe(self, value: float, *, now_s: float) -> None:
        if not math.isfinite(value) or (self._last_s is not None and now_s <= self._last_s):
            return
        elapsed_s = self._age_s if self._last_s is None else now_s - self._last_s
        if not self._experts.levels or elapsed_s > max(GAP_S, 2 * self._tick_s):
            self._restart(value)
        elif elapsed_s > 0 and self._experts.observe(value, num_ticks=whole(elapsed_s / self._tick_s)):
            self._set_models()
        self._last_s = now_s
        self._num_observations += 1
        for track in self._tracks:
            if now_s >= track.wake_s:
                track.advance(value, self._experts, now_s=now_s)

    def predict(self, horizon_s: float) -> Prediction | None:
        if not self._experts.levels:
            return None
        track = self._track(horizon_s)
        num_ticks = horizon_s / self._tick_s
        reaches = track.reaches if track.horizon_s == horizon_s else trend_reaches(num_ticks)
        point = max(track.blend.combine(self._experts.forecast(num_ticks, reaches)), 0.0)
        q10, q50, q90 = (max(point + error, 0.0) for error in self._spread(horizon_s, point))
        return Prediction(horizon_s=horizon_s, point=point, q10=q10, q50=q50, q90=q90)

    def export(self) -> ForecasterState:
        """All that was learned; predictions under way are not part of it."""
        return save_forecaster(
            self._experts, self._tracks, tick_s=self._tick_s, num_observations=self._num_observations
        )

    def restore(self, state: ForecasterState, *, age_s: float) -> None:
        """Take over what an earlier process learned until ``age_s`` ago.

        Raises:
            ValueError: it was learned with other models, horizons or ticks.
        """
        load_forecaster(state, self._experts, self._tracks, tick_s=self._tick_s)
        self._num_observations = state.num_observations
        self._age_s = max(age_s, 0.0)
        self._last_s = None

    def _track(self, horizon_s: float) -> Track:
        return next((track for track in self._tracks if track.horizon_s >= horizon_s), self._tracks[-1])

    def _restart(self, value: float) -> None:
        self._experts.restart(value)
        self._set_models()

    def _set_models(self) -> None:
        for track in self._tracks:
            track.forget_pending()
            track.set_models(self._experts.penalties)

    def _spread(self, horizon_s: float, point: float) -> tuple[float, ...]:
        """What to add to the point for each quantile."""
        shorter = [track for track in self._tracks if track.horizon_s <= horizon_s] or [self._tracks[0]]
        for track in reversed(shorter):
            if spread := track.spread(point):
                widening = math.sqrt(max(horizon_s / track.horizon_s, 1.0))
                return tuple(widening * error for error in spread)
        spread_q90 = NORMAL_Q90 * math.sqrt(max(point, 1.0))
        return -spread_q90, 0.0, spread_q90
