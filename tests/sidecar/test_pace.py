"""Pressure and pace: the largest of its terms, and unknown means busy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sidecar.pace import DEADBAND, EXACT_HEADROOM, GROWTH_PER_S, Pacer, PaceReason
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


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.READY])
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
def test_the_first_pace_follows_mode_and_pressure(
    mode: PaceMode, pressure_frac: float | None, pace: float, reason: PaceReason
) -> None:
    pacer = Pacer()
    pacer.advance(pressure_frac, is_exact=False, now_s=0.0)
    decided = pacer.pace(mode)
    assert (decided.mode, decided.pace, decided.reason) == (mode, pace, reason)


def test_before_the_first_observation_the_load_is_unknown() -> None:
    assert Pacer().pace(PaceMode.AUTO).reason == PaceReason.LOAD_UNKNOWN


@pytest.mark.parametrize(
    ("pressure_frac", "pace"), [(0.0, 1.0), (1 - EXACT_HEADROOM, 1.0), (1 - EXACT_HEADROOM / 2, 0.5), (1.0, 0.0)]
)
def test_where_the_gate_is_exact_only_a_server_that_is_nearly_full_slows_the_trainer(
    pressure_frac: float, pace: float
) -> None:
    pacer = Pacer()
    pacer.advance(pressure_frac, is_exact=True, now_s=0.0)
    assert pacer.pace(PaceMode.AUTO).pace == pytest.approx(pace)


@pytest.mark.parametrize("burst", [0.9, 1.0, None])
def test_the_pace_falls_at_once_and_grows_slowly(burst: float | None) -> None:
    pacer = Pacer()
    seen = []
    for now_s in range(20):
        pacer.advance(burst if now_s == 5 else 0.2, is_exact=False, now_s=float(now_s))
        seen.append(pacer.pace(PaceMode.AUTO))
    low = 0.0 if burst is None else 1 - burst
    assert seen[4].pace == pytest.approx(0.8)
    assert seen[5].pace == pytest.approx(low)
    assert seen[6].pace == pytest.approx(low + GROWTH_PER_S)
    assert seen[6].reason == PaceReason.RECOVERING
    assert seen[6].target == pytest.approx(0.8)
    assert seen[-1].pace == pytest.approx(0.8)
    assert all(later.pace - sooner.pace <= GROWTH_PER_S + 1e-9 for sooner, later in itertools.pairwise(seen))


def test_the_pace_does_not_follow_noise_upwards() -> None:
    pacer = Pacer()
    for now_s in range(10):
        pacer.advance(0.5 + (0.4 * DEADBAND if now_s % 2 else 0.0), is_exact=False, now_s=float(now_s))
    assert pacer.pace(PaceMode.AUTO).pace == pytest.approx(0.5 - 0.4 * DEADBAND)


def test_a_clock_that_stands_or_goes_back_never_raises_the_pace() -> None:
    pacer = Pacer()
    pacer.advance(1.0, is_exact=False, now_s=10.0)
    for now_s in (10.0, 3.0, -1e9):
        pacer.advance(0.0, is_exact=False, now_s=now_s)
        assert pacer.pace(PaceMode.AUTO).pace == 0.0
