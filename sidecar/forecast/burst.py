"""The probability that a burst comes: that the arrivals of the next h seconds reach the burst level, online.

The burst level of a horizon is the 90th percentile of the arrivals in h seconds, over the past (`Percentile`); where
that is under one arrival it is one. For each horizon

    s = Σ w_i·sqrt(l_i)        l_i: simple smoothing of the arrival rate by the factor `ALPHAS`[i], and, where there is
                               a season, what Holt-Winters expects of the next h seconds on average
    P(burst) = 1 / (1 + exp(-(c_0 + c_1·(s - m)/d)))

The weights are those of a `Blend` for the root of the mean rate over the next h seconds: the root makes the noise of
counts the same at every level. The penalty of the i-th level is i·`POISSON_PENALTY`/A³ with A, at least 1, the Allan
factor of the arrivals (`sidecar.forecast.dispersion`). While they are Poisson, what looks like a rise is noise and the
smoothest level knows best, long before the errors a minute ahead can tell; on bursts these errors alone count.

m and d, mean and deviation of s, are fixed after `SETTLE_TICKS` (a scale that moves makes probabilities of different
hours incomparable). c_0 and c_1 come from one Newton step per outcome on the logistic loss, from a stiff prior at a
slope of 1 (a Laplace approximation, kept recursively).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sidecar.forecast.blend import Blend
from sidecar.forecast.cadence import Cadence
from sidecar.forecast.experts import ALPHAS
from sidecar.forecast.percentile import Percentile

BURST_PROBABILITY = 0.9
POISSON_PENALTY = 16.0
"""In nats, for each doubling of the smoothing factor, while arrivals are Poisson. With 1 at all times, fast levels took
0.008 of area under the curve 15 s ahead on drifting near-Poisson traffic, and slow ones 0.05 a minute ahead on on/off
traffic; half or twice of 16, or the square of A, move neither by more than 0.004."""
SEASONAL_PENALTY = 1.0
DISCOUNT = 0.9999
"""Per tick: about the last three hours at one tick per second."""
PER_HORIZON = 6
"""With half as many, the weights for 15 s ahead come too late: 0.01 of area under the curve on on/off traffic."""
MAX_PENDING = 2 * PER_HORIZON
SETTLE_TICKS = 600.0
INTERCEPT_PRECISION, SLOPE_PRECISION = 100.0, 1000.0
"""Stiff: when the slope follows a few bursts, the order of the probabilities of different hours suffers, by 0.02 of
area under the curve 15 s ahead on on/off traffic with a tenth of it."""
MIN_DEVIATION = 0.3
"""Of a root of a rate; the root of a Poisson count deviates by 0.5."""


class BurstForecast(NamedTuple):
    probability: float
    level: float
    """Arrivals within the horizon that make a burst."""


class Pending(NamedTuple):
    target_s: float
    arrivals: float
    roots: list[float]
    score: float


class BurstTrack:
    """One horizon."""

    def __init__(self, horizon_s: float, *, tick_s: float) -> None:
        self.horizon_s = horizon_s
        self.cadence = Cadence(horizon_s, tick_s=tick_s, per_horizon=PER_HORIZON)
        self._discount = self.cadence.discount(DISCOUNT)
        self._penalties: Sequence[float] = penalties(1.0)
        self.blend = Blend(
            self._penalties[: len(ALPHAS)], discount=self._discount, overlap=self.cadence.overlap, own_means=True
        )
        self.level = Percentile(BURST_PROBABILITY, discount=self._discount)
        self.pending: deque[Pending] = deque(maxlen=MAX_PENDING)
        self.num_outcomes = 0
        self.mean, self.variance = 0.0, 1.0
        self.intercept, self.slope = math.log((1 - BURST_PROBABILITY) / BURST_PROBABILITY), 1.0
        self.precision = (INTERCEPT_PRECISION, 0.0, SLOPE_PRECISION)
        """Of intercept and slope: the symmetric matrix's 00, 01 and 11."""

    @property
    def burst_level(self) -> float:
        return max(self.level.value or 0.0, 1.0)

    def expect(self, prior: Sequence[float]) -> None:
        """Weigh the models with these `penalties` from now on."""
        self._penalties = prior
        self.blend.penalties = list(prior[: len(self.blend.weights)])

    def with_seasonal(self, roots: list[float], seasonal_mean: float | None) -> list[float]:
        """The roots that the blend weighs: those of the levels, and of a seasonal forecast while there is one."""
        if seasonal_mean is None:
            return roots
        return [*roots, math.sqrt(max(seasonal_mean, 0.0))]

    def issue(self, roots: list[float], arrivals: float, *, now_s: float) -> None:
        """Begin a sum at ``now_s``, when ``arrivals`` had come in all."""
        self.cadence.take_turn(now_s)
        if len(roots) != len(self.blend.weights):
            self.set_models(len(roots))
        self.pending.append(Pending(now_s + self.horizon_s, arrivals, roots, self.blend.average(roots)))

    def set_models(self, num_models: int) -> None:
        """The seasonal model came or went."""
        self.blend.resize(self._penalties[:num_models])

    def learn(self, pending: Pending, arrivals: float) -> None:
        """``arrivals`` came within the horizon of what was ``pending``."""
        if len(pending.roots) == len(self.blend.weights):
            self.blend.learn(pending.roots, math.sqrt(max(arrivals, 0.0) / self.horizon_s))
        self.num_outcomes += 1
        if self.num_outcomes * self.cadence.interval_ticks <= SETTLE_TICKS:
            off = pending.score - self.mean
            self.mean += off / self.num_outcomes
            self.variance += (off * (pending.score - self.mean) - self.variance) / self.num_outcomes
        if self.level.value is not None:
            self._correct(self._scale(pending.score), float(arrivals >= self.burst_level * (1 - 1e-9)))
        self.level.add(arrivals)

    def probability(self, roots: Sequence[float]) -> float:
        # Between a season's coming or going and the next turn, the last weights stand for what they know.
        roots = roots[: len(self.blend.weights)]
        if len(roots) < len(self.blend.weights):
            roots = [*roots, max(roots)]
        return logistic(self.intercept + self.slope * self._scale(self.blend.average(roots)))

    def _scale(self, score: float) -> float:
        return (score - self.mean) / max(math.sqrt(self.variance), MIN_DEVIATION)

    def _correct(self, x: float, burst: float) -> None:
        """One Newton step on the logistic loss of one outcome; outcomes that overlap share one vote."""
        p = logistic(self.intercept + self.slope * x)
        weight = p * (1.0 - p) / self.cadence.overlap
        discount = self._discount
        a, b, c = self.precision
        a, b, c = discount * a + weight, discount * b + weight * x, discount * c + weight * x * x
        self.precision = (a, b, c)
        error = (burst - p) / self.cadence.overlap
        determinant = a * c - b * b
        if determinant <= 1e-12:
            return
        self.intercept += error * (c - b * x) / determinant
        # Less traffic never makes a burst more probable: a slope under 0 is noise of few outcomes.
        self.slope = max(self.slope + error * (a * x - b) / determinant, 0.05)


def penalties(allan: float) -> tuple[float, ...]:
    """Of the models, in nats, the seasonal one last, when arrivals have this Allan factor."""
    per_doubling = POISSON_PENALTY / max(allan, 1.0) ** 3
    return (*(per_doubling * i for i in range(len(ALPHAS))), SEASONAL_PENALTY)


def logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(x, -30.0), 30.0)))
