"""Additive Holt-Winters on irregular ticks (pure).

With m seasons, phase p = (ticks so far) mod m and n ticks since the last observation:

    l' = (l + n·b) + a_n · (y - s_p - l - n·b)
    b' = b + c_n · ((l' - l) / n - b)
    s_p' = s_p + g · (y - s_p - l - n·b)

(Winters 1960, in error-correction form; Hyndman & Athanasopoulos, Forecasting: Principles and Practice, ch. 8.3.) Only
the season that is observed learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.forecast.smoothing import decay


@dataclass(frozen=True, slots=True)
class Seasonal:
    """Parameters of one Holt-Winters model."""

    alpha: float
    beta: float
    gamma: float

    @property
    def method(self) -> str:
        return "holt_winters"


class HoltWinters:
    """State of one model. The seasonal list is changed in place: a copy per tick would cost its length."""

    __slots__ = ("level", "model", "seasons", "tick", "trend")

    def __init__(
        self, model: Seasonal, seasons: Sequence[float], *, level: float, trend: float = 0.0, tick: float = 0.0
    ) -> None:
        """``seasons[0]`` is what the moment 0 ticks adds to the level; the last observation was at ``tick``."""
        self.model = model
        self.level = level
        self.trend = trend
        self.seasons = list(seasons)
        self.tick = tick % len(self.seasons)

    def after(self, num_ticks: float) -> float:
        """Expected value ``num_ticks`` after the last observation."""
        phase = int(self.tick + num_ticks + 0.5) % len(self.seasons)
        return self.level + num_ticks * self.trend + self.seasons[phase]

    def mean(self, num_ticks: float) -> float:
        """Mean of the expected values of the next ``num_ticks``."""
        count, season = max(int(num_ticks + 0.5), 1), len(self.seasons)
        laps, rest = divmod(count, season)
        first = int(self.tick + 1.5) % season
        ahead = self.seasons[first : first + rest] + self.seasons[: max(first + rest - season, 0)]
        total = sum(ahead) + (laps * sum(self.seasons) if laps else 0.0)
        return self.level + (count + 1) / 2 * self.trend + total / count

    def observe(self, value: float, *, num_ticks: float) -> None:
        """``value`` was seen ``num_ticks`` after the last one."""
        self.tick = (self.tick + num_ticks) % len(self.seasons)
        phase = int(self.tick + 0.5) % len(self.seasons)
        base = self.level + num_ticks * self.trend
        error = value - self.seasons[phase] - base
        weight = decay(self.model.alpha, num_ticks)
        level = base + weight * error
        self.trend += decay(self.model.beta, num_ticks) * ((level - self.level) / num_ticks - self.trend)
        self.seasons[phase] += self.model.gamma * error
        self.level = level


def initial_seasons(values: Sequence[float], num_seasons: int) -> tuple[float, list[float]]:
    """Level and seasonal terms of ``values``, oldest first; ``values[0]`` has phase 0.

    The level is the mean of the last whole season, the terms are the means per phase about the mean of all.
    """
    whole = len(values) // num_seasons * num_seasons
    used = values[:whole]
    mean = sum(used) / whole
    means = [sum(used[phase::num_seasons]) * num_seasons / whole - mean for phase in range(num_seasons)]
    return sum(values[-num_seasons:]) / num_seasons, means
