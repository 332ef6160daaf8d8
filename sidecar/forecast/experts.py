"""The models that run side by side on one series: simple, Holt and damped Holt smoothing, and Holt-Winters once a
season is known. Each keeps its own state; `sidecar.forecast.blend` says how much each counts, per horizon.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.forecast.season import SeasonFinder
from sidecar.forecast.seasonal import HoltWinters, Seasonal, initial_seasons
from sidecar.forecast.smoothing import Smoothing, decay, decays, reach

ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
TRENDS = (
    Smoothing(0.1, 0.02),
    Smoothing(0.5, 0.15),
    Smoothing(0.2, 0.1, phi=0.95),
    Smoothing(0.6, 0.2, phi=0.85),
)
SEASONALS = (Seasonal(0.05, 0.001, 0.05), Seasonal(0.3, 0.001, 0.1))
PENALTIES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 3.0, 5.0, 4.0, 6.0)
"""In nats, of the simple and the trend models: one for each doubling of the smoothing factor, one for a trend."""
SEASONAL_PENALTIES = (1.0, 2.0)
METHODS = ("simple",) * len(ALPHAS) + tuple(model.method for model in TRENDS) + ("holt_winters",) * len(SEASONALS)


class Experts:
    """States of the models. Levels and trends are plain lists: objects would double the cost of a tick."""

    def __init__(self) -> None:
        self.levels: list[float] = []
        self.trends = [0.0] * len(TRENDS)
        """Levels of the simple models, then of the trend models; trends of the latter."""
        self.seasonals: list[HoltWinters] = []
        self.finder = SeasonFinder()

    @property
    def season_ticks(self) -> int | None:
        return len(self.seasonals[0].seasons) if self.seasonals else None

    @property
    def penalties(self) -> tuple[float, ...]:
        return PENALTIES + (SEASONAL_PENALTIES if self.seasonals else ())

    def observe(self, value: float, *, num_ticks: float) -> bool:
        """One more value, ``num_ticks`` after the last; True when Holt-Winters came, went or changed its season."""
        levels = self.levels
        for i, weight in enumerate(decays(ALPHAS, num_ticks)):
            levels[i] += weight * (value - levels[i])
        for i, model in enumerate(TRENDS):
            self._advance_trend(i, len(ALPHAS) + i, model, value, num_ticks)
        for seasonal in self.seasonals:
            seasonal.observe(value, num_ticks=num_ticks)
        if self.finder.observe(value, num_ticks=num_ticks):
            self._start_seasonals()
            return True
        return False

    def restart(self, value: float) -> None:
        """Begin anew at ``value`` without a trend; the season goes, since a gap loses the phase."""
        self.levels = [value] * (len(ALPHAS) + len(TRENDS))
        self.trends = [0.0] * len(TRENDS)
        self.seasonals = []
        self.finder = SeasonFinder()

    def forecast(self, num_ticks: float, reaches: Sequence[float]) -> list[float]:
        """What each model expects ``num_ticks`` from now; ``reaches`` are those of `trend_reaches`."""
        num_simple = len(ALPHAS)
        forecasts = self.levels[:num_simple]
        forecasts += [
            level + far * trend
            for level, far, trend in zip(self.levels[num_simple:], reaches, self.trends, strict=True)
        ]
        forecasts += [seasonal.after(num_ticks) for seasonal in self.seasonals]
        return forecasts

    def seasonal_mean(self, num_ticks: float) -> float | None:
        """Mean of what Holt-Winters expects of the next ``num_ticks``; None without a season."""
        return self.seasonals[0].mean(num_ticks) if self.seasonals else None

    def _advance_trend(self, i: int, at: int, model: Smoothing, value: float, num_ticks: float) -> None:
        """`smoothing.update` on the lists."""
        assert model.beta is not None
        before, phi = self.levels[at], model.phi
        trend = self.trends[i]
        expected = before + reach(phi, num_ticks) * trend
        level = expected + decay(model.alpha, num_ticks) * (value - expected)
        if phi != 1.0:
            trend *= phi**num_ticks
        self.levels[at] = level
        self.trends[i] = trend + decay(model.beta, num_ticks) * ((level - before) / num_ticks - trend)

    def _start_seasonals(self) -> None:
        season_ticks = self.finder.season_ticks
        self.seasonals = []
        if season_ticks is None:
            return
        values = self.finder.window
        level, seasons = initial_seasons(values, season_ticks)
        self.seasonals = [HoltWinters(model, seasons, level=level, tick=len(values) - 1.0) for model in SEASONALS]


def trend_reaches(num_ticks: float) -> tuple[float, ...]:
    """How far the trend of each of `TRENDS` goes in ``num_ticks``."""
    return tuple(reach(model.phi, num_ticks) for model in TRENDS)
