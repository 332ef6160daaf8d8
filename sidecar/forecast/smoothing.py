"""Exponential smoothing, simple and with a linear trend, damped or not, on irregular ticks (pure).

With n ticks since the last observation, y was expected to be l + s_n·b with s_n = φ + φ² + … + φⁿ (n for φ = 1). Then

    l' = (l + s_n·b) + a_n · (y - l - s_n·b)         a_n = 1 - (1 - a)^n
    b' = φⁿ·b + c_n · ((l' - l) / n - φⁿ·b)          c_n = 1 - (1 - c)^n

For n = 1 these are the textbook equations (Hyndman & Athanasopoulos, Forecasting: Principles and Practice, ch. 8; the
damped trend is Gardner & McKenzie's of 1985); a tick of another length weighs the past as that many ticks of nothing
new would have. Simple smoothing has b = 0. The first observation is the first level, with no trend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

JITTER_TICKS = 0.02


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Parameters of one model; ``beta`` None is simple smoothing, ``phi`` under 1 a damped trend."""

    alpha: float
    beta: float | None = None
    phi: float = 1.0

    @property
    def method(self) -> str:
        if self.beta is None:
            return "simple"
        return "holt" if self.phi == 1.0 else "damped_holt"


@dataclass(frozen=True, slots=True)
class Level:
    """State of one model: level, and trend per tick."""

    level: float
    trend: float = 0.0

    def after(self, num_ticks: float, *, phi: float = 1.0) -> float:
        """Expected value ``num_ticks`` later."""
        return self.level + reach(phi, num_ticks) * self.trend


def update(model: Smoothing, state: Level, value: float, *, num_ticks: float) -> Level:
    """The state after ``value`` was seen ``num_ticks`` after the last one."""
    if model.beta is None:
        return Level(state.level + decay(model.alpha, num_ticks) * (value - state.level))
    expected = state.after(num_ticks, phi=model.phi)
    level = expected + decay(model.alpha, num_ticks) * (value - expected)
    trend = state.trend * math.pow(model.phi, num_ticks)
    slope = (level - state.level) / num_ticks
    return Level(level, trend + decay(model.beta, num_ticks) * (slope - trend))


def decay(rate: float, num_ticks: float) -> float:
    """Weight of the newest of ``num_ticks`` ticks when one tick weighs ``rate``."""
    return rate if num_ticks == 1.0 else 1.0 - math.pow(1.0 - rate, num_ticks)


def reach(phi: float, num_ticks: float) -> float:
    """How many ticks' worth of trend is to come within ``num_ticks``."""
    if phi == 1.0 or num_ticks == 0.0:
        return num_ticks
    return phi * (1.0 - math.pow(phi, num_ticks)) / (1.0 - phi)


def decays(rates: Sequence[float], num_ticks: float) -> Sequence[float]:
    """`decay` of each of ``rates``."""
    return rates if num_ticks == 1.0 else [decay(rate, num_ticks) for rate in rates]


def whole(num_ticks: float) -> float:
    """``num_ticks``, or 1 when jitter is all that it differs by: powers cost more than they tell."""
    return 1.0 if abs(num_ticks - 1.0) < JITTER_TICKS else num_ticks
