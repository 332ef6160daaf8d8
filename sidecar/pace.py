"""How much the trainer beside the server may run: 0 not at all, 1 freely (pure).

auto   1 - pressure; 0 while the pressure is unknown, because unknown means busy
pause  0
run    1, whatever the load is: an operator's order
"""

from __future__ import annotations

from enum import StrEnum

from sidecar.schema import Pace, PaceMode


class PaceReason(StrEnum):
    """Why the pace is what it is."""

    PRESSURE = "pressure"
    LOAD_UNKNOWN = "load_unknown"
    PAUSED = "paused"
    RUN_ORDERED = "run_ordered"


def decide_pace(mode: PaceMode, pressure_frac: float | None) -> Pace:
    if mode is PaceMode.PAUSE:
        return Pace(mode=mode, pace=0.0, reason=PaceReason.PAUSED)
    if mode is PaceMode.RUN:
        return Pace(mode=mode, pace=1.0, reason=PaceReason.RUN_ORDERED)
    if pressure_frac is None:
        return Pace(mode=mode, pace=0.0, reason=PaceReason.LOAD_UNKNOWN)
    return Pace(mode=mode, pace=1.0 - pressure_frac, reason=PaceReason.PRESSURE)
