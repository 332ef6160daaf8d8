"""How much the trainer beside the server may run: 0 not at all, 1 freely (pure).

auto   follows the headroom 1 - pressure, which counts the load that is forecast: down at once, up by `GROWTH_PER_S`,
       and not for a difference below `DEADBAND`; 0 while the pressure is unknown, because unknown means busy
pause  0
run    1, whatever the load is: an operator's order

Where the gate knows of every request it closes for each by itself. The pace then need not keep a trainer from requests,
only from a server that is close to full, whose lulls are too short to be worth a trainer's cold start: it is 1 down to
a headroom of `EXACT_HEADROOM`, and falls to 0 with it from there.
"""

from __future__ import annotations

from enum import StrEnum

from sidecar.schema import Pace, PaceMode

GROWTH_PER_S = 0.1
"""Ten seconds from a halt to full speed: longer than the pauses within a burst."""
DEADBAND = 0.05
EXACT_HEADROOM = 0.25


class PaceReason(StrEnum):
    """Why the pace is what it is."""

    PRESSURE = "pressure"
    RECOVERING = "recovering"
    """There is room for more, and the pace grows towards it."""
    LOAD_UNKNOWN = "load_unknown"
    PAUSED = "paused"
    RUN_ORDERED = "run_ordered"


def target_of(pressure_frac: float, *, is_exact: bool) -> float:
    """The pace that a server under this pressure can bear for long."""
    headroom = 1.0 - pressure_frac
    return min(headroom / EXACT_HEADROOM, 1.0) if is_exact else headroom


class Pacer:
    """The pace of one server over time."""

    def __init__(self) -> None:
        self._pace = 0.0
        self._target: float | None = None
        self._advanced_s: float | None = None

    def advance(self, pressure_frac: float | None, *, is_exact: bool, now_s: float) -> None:
        """Take in an observation made at ``now_s`` (any clock that does not go back)."""
        passed_s = max(now_s - self._advanced_s, 0.0) if self._advanced_s is not None else 0.0
        is_first = self._advanced_s is None
        self._advanced_s = now_s
        self._target = None if pressure_frac is None else target_of(pressure_frac, is_exact=is_exact)
        if self._target is None:
            self._pace = 0.0
        elif self._target <= self._pace or is_first:
            self._pace = self._target
        elif self._target >= min(self._pace + DEADBAND, 1.0):
            self._pace = min(self._pace + GROWTH_PER_S * passed_s, self._target)

    def pace(self, mode: PaceMode) -> Pace:
        if mode is PaceMode.PAUSE:
            return Pace(mode=mode, pace=0.0, target=self._target, reason=PaceReason.PAUSED)
        if mode is PaceMode.RUN:
            return Pace(mode=mode, pace=1.0, target=self._target, reason=PaceReason.RUN_ORDERED)
        if self._target is None:
            return Pace(mode=mode, pace=0.0, target=None, reason=PaceReason.LOAD_UNKNOWN)
        reason = PaceReason.RECOVERING if self._pace < self._target else PaceReason.PRESSURE
        return Pace(mode=mode, pace=self._pace, target=self._target, reason=reason)
