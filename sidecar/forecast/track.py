"""One horizon of a forecaster: predictions under way, the blend of the models, and the residuals of its forecasts.

A prediction is issued at a `Cadence` and kept until its target time, then compared with the
observation next to that time. Residuals are kept apart by whether the forecast is under, near or over the mean: on
on/off traffic the spread within a burst says nothing about that of a lull.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sidecar.forecast.blend import Blend
from sidecar.forecast.cadence import Cadence
from sidecar.forecast.experts import PENALTIES, Experts, trend_reaches
from sidecar.forecast.residuals import PROBABILITIES, Residuals

PER_HORIZON = 3
MAX_PENDING = 2 * PER_HORIZON
DISCOUNT = 0.9995
"""Per tick: about the last half hour at one tick per second."""
CONDITION_EDGES = (0.5, 1.5)
"""Of the mean: a forecast under, between, over."""
NORMAL_Q90 = 1.2816


class Pending(NamedTuple):
    target_s: float
    forecasts: list[float]
    point: float
    quantiles: tuple[float, ...]
    condition: int


class Track:
    """What is known about one horizon."""

    def __init__(self, horizon_s: float, *, tick_s: float) -> None:
        self.horizon_s = horizon_s
        self.num_ticks = horizon_s / tick_s
        self.reaches = trend_reaches(self.num_ticks)
        self._tick_s = tick_s
        self._cadence = Cadence(horizon_s, tick_s=tick_s, per_horizon=PER_HORIZON)
        self.blend = Blend(PENALTIES, discount=self._cadence.discount(DISCOUNT), overlap=self._cadence.overlap)
        self.residuals = tuple(self.new_residuals() for _ in range(len(CONDITION_EDGES) + 1))
        self._pending: deque[Pending] = deque(maxlen=MAX_PENDING)
        self.wake_s = -math.inf

    def new_residuals(self, residuals: Sequence[float] = (), levels: Sequence[float] = PROBABILITIES) -> Residuals:
        """Of this horizon, with what was kept of earlier ones."""
        return Residuals(residuals, levels, interval_ticks=self._cadence.interval_ticks)

    def advance(self, value: float, experts: Experts, *, now_s: float) -> None:
        """``value`` was seen at ``now_s`` and ``experts`` know it; nothing is to be done before `wake_s`."""
        self._settle(value, now_s=now_s)
        if now_s >= self._cadence.next_s:
            self._cadence.take_turn(now_s)
            self._issue(experts.forecast(self.num_ticks, self.reaches), now_s=now_s)
        target_s = self._pending[0].target_s if self._pending else math.inf
        self.wake_s = min(self._cadence.next_s, target_s - self._tick_s / 2)

    def _issue(self, forecasts: list[float], *, now_s: float) -> None:
        """Keep the models' ``forecasts``, made at ``now_s``, for their target time."""
        point = max(self.blend.combine(forecasts), 0.0)
        condition = self._condition(point)
        spread = self.spread(point)
        quantiles = tuple(max(point + error, 0.0) for error in spread) if spread else ()
        self._pending.append(Pending(now_s + self.horizon_s, forecasts, point, quantiles, condition))

    def _settle(self, value: float, *, now_s: float) -> None:
        """Compare ``value``, seen at ``now_s``, with the predictions that were about this moment.

        A prediction is about the observation within a tick of its target; where there was none (a gap, ticks that
        were missed) it is dropped.
        """
        while self._pending and self._pending[0].target_s <= now_s + self._tick_s / 2:
            pending = self._pending.popleft()
            if now_s - pending.target_s > self._tick_s:
                continue
            residuals = self.residuals[pending.condition]
            if pending.quantiles:
                residuals.correct(value, pending.quantiles)
            residuals.add(value - pending.point)
            if len(pending.forecasts) == len(self.blend.weights):
                self.blend.learn(pending.forecasts, value)

    def forget_pending(self) -> None:
        self._pending.clear()

    def set_models(self, penalties: Sequence[float]) -> None:
        """Models came or went at the end of the list."""
        self.blend.resize(penalties)

    def spread(self, point: float) -> tuple[float, ...] | None:
        """What to add to ``point`` for each quantile; None while this horizon knows too little.

        A condition that was hardly met yet has the spread of a count that is as overdispersed as the others' are.
        """
        residuals = self.residuals[self._condition(point)]
        if residuals.enough:
            return residuals.quantiles()
        known = [other for other in self.residuals if other.enough]
        if not known:
            return None
        widest = max(other.quantiles()[2] for other in known)
        spread = max(widest, NORMAL_Q90 * math.sqrt(max(point, 1.0)))
        return -spread, 0.0, spread

    def _condition(self, point: float) -> int:
        return sum(point > edge * self.blend.mean for edge in CONDITION_EDGES)
