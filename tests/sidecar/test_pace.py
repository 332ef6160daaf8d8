"""Pressure and pace: the largest of its terms, and unknown means busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.pace import PaceReason, decide_pace
from sidecar.pressure import pressure
from sidecar.schema import EngineState, ForecastPoint, PaceMode
from sidecar.source.snapshot import EngineSnapshot

SNAPSHOT = EngineSnapshot(t_s=0.0, monotonic_s=0.0, running=1.0, waiting=1.0, kv_usage_max_frac=0.1)


def ahead(horizon_s: float, running_q90: float | None) -> ForecastPoint:
    return ForecastPoint(
        horizon_s=horizon_s,
        arrivals_per_s=0,
        arrivals_per_s_q10=0,
        arrivals_per_s_q50=0,
        arrivals_per_s_q90=0,
        running_q90=running_q90,
    )


@pytest.mark.parametrize(
    ("snapshot", "forecast", "expected"),
    [
        (SNAPSHOT, (), 0.25),
        (replace(SNAPSHOT, running=50.0), (), 1.0),
        (replace(SNAPSHOT, kv_usage_max_frac=0.9), (), 0.9),
        (replace(SNAPSHOT, kv_usage_max_frac=None), (), 0.25),
        (SNAPSHOT, (ahead(5.0, 4.0),), 0.5),
        (SNAPSHOT, (ahead(10.0, 8.0),), 0.25),
        (SNAPSHOT, (ahead(1.0, None),), 0.25),
        (replace(SNAPSHOT, running=None), (ahead(1.0, 1.0),), None),
        (replace(SNAPSHOT, waiting=None), (), None),
        (None, (), None),
    ],
)
def test_pressure(snapshot: EngineSnapshot | None, forecast: tuple[ForecastPoint, ...], expected: float | None) -> None:
    assert pressure(EngineState.READY, snapshot, forecast=forecast, busy_requests=8) == expected


@pytest.mark.parametrize("state", set(EngineState) - {EngineState.READY})
def test_pressure_is_unknown_unless_the_engine_is_ready(state: EngineState) -> None:
    assert pressure(state, SNAPSHOT, forecast=(), busy_requests=8) is None


@pytest.mark.parametrize(
    ("mode", "pressure_frac", "pace", "reason"),
    [
        (PaceMode.AUTO, 0.25, 0.75, PaceReason.PRESSURE),
        (PaceMode.AUTO, 1.0, 0.0, PaceReason.PRESSURE),
        (PaceMode.AUTO, None, 0.0, PaceReason.LOAD_UNKNOWN),
        (PaceMode.PAUSE, 0.0, 0.0, PaceReason.PAUSED),
        (PaceMode.RUN, 1.0, 1.0, PaceReason.RUN_ORDERED),
        (PaceMode.RUN, None, 1.0, PaceReason.RUN_ORDERED),
    ],
)
def test_pace(mode: PaceMode, pressure_frac: float | None, pace: float, reason: PaceReason) -> None:
    decided = decide_pace(mode, pressure_frac)
    assert (decided.mode, decided.pace, decided.reason) == (mode, pace, reason)
