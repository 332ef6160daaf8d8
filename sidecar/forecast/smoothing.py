"""Exponential smoothing, simple and with Holt's linear trend, on irregular ticks (pure).

With n ticks since the last observation y was expected to be l + n·b. Then

    l' = (l + n·b) + a_n · (y - l - n·b)          a_n = 1 - (1 - a)^n
    b' = b + c_n · ((l' - l) / n - b)             c_n = 1 - (1 - c)^n

For n = 1 these are the textbook equations (Hyndman & Athanasopoulos, Forecasting: Principles and Practice, ch. 8);
a tick of another length weighs the past as that many ticks of nothing new would have. Simple smoothing has b = 0.
The first observation is the first level, with no trend.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Parameters of one model; ``beta`` None is simple smoothing."""

    alpha: float
    beta: float | None = None

    @property
    def method(self) -> str:
        return "simple" if self.beta is None else "holt"


@dataclass(frozen=True, slots=True)
class Level:
    """State of one model: level, and trend per tick."""

    level: float
    trend: float = 0.0

    def after(self, num_ticks: float) -> float:
        """Expected value ``num_ticks`` later."""
        return self.level + num_ticks * self.trend


def update(model: Smoothing, state: Level, value: float, *, num_ticks: float) -> Level:
    """The state after ``value`` was seen ``num_ticks`` after the last one."""
    expected = state.after(num_ticks)
    level = expected + decay(model.alpha, num_ticks) * (value - expected)
    if model.beta is None:
        return Level(level)
    slope = (level - state.level) / num_ticks
    return Level(level, state.trend + decay(model.beta, num_ticks) * (slope - state.trend))


def decay(rate: float, num_ticks: float) -> float:
    """Weight of the newest of ``num_ticks`` ticks when one tick weighs ``rate``."""
    return rate if num_ticks == 1.0 else 1.0 - (1.0 - rate) ** num_ticks
