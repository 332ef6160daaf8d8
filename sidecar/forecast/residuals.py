"""Quantiles from what the forecasts of one horizon were wrong by.

Each prediction that is issued is kept until its target time, then compared with the observation next to that time.
Both lists are bounded: `MAX_PENDING` predictions under way (a new one every horizon/`MAX_PENDING` seconds) and the
last `MAX_RESIDUALS` residuals.
"""

from __future__ import annotations

from collections import deque

MAX_PENDING = 32
MAX_RESIDUALS = 128
# A 10 % quantile of fewer values is their minimum.
MIN_RESIDUALS = 10


class Residuals:
    """Predictions under way and residuals of one horizon."""

    def __init__(self, horizon_s: float, *, tick_s: float) -> None:
        self.horizon_s = horizon_s
        self._tick_s = tick_s
        self._pending: deque[tuple[float, float]] = deque(maxlen=MAX_PENDING + 1)
        self._residuals: deque[float] = deque(maxlen=MAX_RESIDUALS)

    @property
    def enough(self) -> bool:
        return len(self._residuals) >= MIN_RESIDUALS

    def issue(self, prediction: float, *, now_s: float) -> None:
        """Keep ``prediction``, made at ``now_s``, for its target time."""
        target_s = now_s + self.horizon_s
        if not self._pending or target_s - self._pending[-1][0] >= self.horizon_s / MAX_PENDING:
            self._pending.append((target_s, prediction))

    def settle(self, value: float, *, now_s: float) -> None:
        """Compare ``value``, seen at ``now_s``, with the predictions that were about this moment.

        A prediction is about the observation within a tick of its target; where there was none (a gap, ticks that
        were missed) it is dropped.
        """
        while self._pending and self._pending[0][0] <= now_s + self._tick_s / 2:
            target_s, prediction = self._pending.popleft()
            if now_s - target_s <= self._tick_s:
                self._residuals.append(value - prediction)

    def forget_pending(self) -> None:
        self._pending.clear()

    def quantiles(self, probabilities: tuple[float, ...]) -> tuple[float, ...]:
        """Quantiles of the residuals, linear between order statistics. At least one residual must be known."""
        ordered = sorted(self._residuals)
        return tuple(quantile(ordered, p) for p in probabilities)


def quantile(ordered: list[float], probability: float) -> float:
    """The quantile of ascending values, linear between neighbours (type 7 of Hyndman & Fan)."""
    position = probability * (len(ordered) - 1)
    low = min(int(position), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
