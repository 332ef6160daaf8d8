"""How often predictions of a horizon are issued, and what that makes of their outcomes.

A prediction a minute ahead that is issued every second would tell little more than one every third of a minute, and
cost twenty times as much.
"""

from __future__ import annotations

import math

MIN_INTERVAL_TICKS = 4
"""All the horizons together shall cost at most 50 µs a tick."""
NUM_EAGER = 40
"""So many predictions are issued at every tick if need be: what is new is learned quickly."""


class Cadence:
    """Predictions ``horizon_s`` ahead, ``per_horizon`` times within it, at most every fourth tick."""

    __slots__ = (
        "_eager_spacing_s",
        "_num_issued",
        "_spacing_s",
        "horizon_s",
        "interval_ticks",
        "next_s",
        "num_ticks",
        "overlap",
    )

    def __init__(self, horizon_s: float, *, tick_s: float, per_horizon: int) -> None:
        self.horizon_s = horizon_s
        self.num_ticks = horizon_s / tick_s
        wanted_ticks = max(self.num_ticks / per_horizon, float(MIN_INTERVAL_TICKS))
        # Half a tick of tolerance: a tick that comes early by jitter must not skip its turn.
        self._spacing_s = (wanted_ticks - 0.5) * tick_s
        self._eager_spacing_s = (max(self.num_ticks / per_horizon, 1.0) - 0.5) * tick_s
        self._num_issued = 0
        self.next_s = -math.inf
        """When the next prediction is due."""
        self.interval_ticks = math.ceil(wanted_ticks - 0.5)
        self.overlap = max(self.num_ticks / self.interval_ticks, 1.0)
        """How many outcomes in a row share most of what they are made of."""

    def take_turn(self, now_s: float) -> None:
        """A prediction was issued at ``now_s``."""
        self._num_issued += 1
        self.next_s = now_s + (self._spacing_s if self._num_issued >= NUM_EAGER else self._eager_spacing_s)

    def discount(self, per_tick: float) -> float:
        """From one prediction to the next."""
        return per_tick**self.interval_ticks
