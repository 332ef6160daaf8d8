"""The interface of every forecaster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the series is expected to be ``horizon_s`` from the last observation. ``0 <= q10 <= q50 <= q90``."""

    horizon_s: float
    point: float
    q10: float
    q50: float
    q90: float


class Forecaster(Protocol):
    """Learns a non-negative series from irregular observations and predicts it."""

    @property
    def num_observations(self) -> int: ...

    def method(self, horizon_s: float) -> str:
        """Name of the model that counts most for ``horizon_s`` now."""

    def observe(self, value: float, *, now_s: float) -> None:
        """One more value, seen at ``now_s`` on a clock that never jumps."""

    def predict(self, horizon_s: float) -> Prediction | None:
        """The prediction for ``horizon_s`` after the last observation; None before the first."""
