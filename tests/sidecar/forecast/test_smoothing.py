"""Smoothing against statsmodels on the same series, and on ticks of other lengths."""

from __future__ import annotations

import math
import random

import pytest
from statsmodels.tsa.holtwinters import Holt, SimpleExpSmoothing

from sidecar.forecast.smoothing import Level, Smoothing, decay, update


def series(seed: int, num: int = 120) -> list[float]:
    rng = random.Random(seed)
    return [max(0.0, 5 + 4 * math.sin(i / 9) + rng.gauss(0, 1)) for i in range(num)]


def run(model: Smoothing, values: list[float], start: Level) -> tuple[list[float], Level]:
    """One-step forecasts of every value, and the last state."""
    fitted = []
    state = start
    for value in values:
        fitted.append(state.after(1.0))
        state = update(model, state, value, num_ticks=1.0)
    return fitted, state


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.8])
@pytest.mark.parametrize("seed", [1, 2])
def test_simple_smoothing_is_that_of_statsmodels(alpha: float, seed: int) -> None:
    values = series(seed)
    reference = SimpleExpSmoothing(values, initialization_method="known", initial_level=values[0]).fit(
        smoothing_level=alpha, optimized=False
    )
    fitted, state = run(Smoothing(alpha), values, Level(values[0]))
    assert fitted == pytest.approx(list(reference.fittedvalues), rel=1e-9)
    assert [state.after(h) for h in (1, 5, 30)] == pytest.approx([reference.forecast(h)[-1] for h in (1, 5, 30)])


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.02), (0.4, 0.3), (0.8, 0.1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_holt_is_that_of_statsmodels(alpha: float, beta: float, seed: int) -> None:
    values = series(seed)
    reference = Holt(values, initialization_method="known", initial_level=values[0], initial_trend=0.0).fit(
        smoothing_level=alpha, smoothing_trend=beta, optimized=False
    )
    fitted, state = run(Smoothing(alpha, beta), values, Level(values[0]))
    assert fitted == pytest.approx(list(reference.fittedvalues), rel=1e-9)
    assert [state.after(h) for h in (1, 5, 30)] == pytest.approx([reference.forecast(h)[-1] for h in (1, 5, 30)])


@pytest.mark.parametrize("model", [Smoothing(0.3), Smoothing(0.3, 0.1)])
def test_a_constant_stays_whatever_the_ticks(model: Smoothing) -> None:
    state = Level(7.0)
    for num_ticks in (1.0, 0.1, 3.7, 25.0):
        state = update(model, state, 7.0, num_ticks=num_ticks)
        assert state.after(10.0) == pytest.approx(7.0)


@pytest.mark.parametrize("model", [Smoothing(0.3), Smoothing(0.3, 0.1)])
def test_a_long_tick_weighs_as_much_as_its_length_in_ticks(model: Smoothing) -> None:
    assert decay(0.3, 2.0) == pytest.approx(1 - 0.7**2)
    state = update(Smoothing(0.3), Level(0.0), 1.0, num_ticks=2.0)
    twice = update(Smoothing(0.3), update(Smoothing(0.3), Level(0.0), 1.0, num_ticks=1.0), 1.0, num_ticks=1.0)
    assert state.level == pytest.approx(twice.level)


def test_holt_finds_a_slope_on_irregular_ticks() -> None:
    rng = random.Random(3)
    state, now = Level(0.0), 0.0
    for _ in range(400):
        step = rng.choice([0.5, 1.0, 2.0])
        now += step
        state = update(Smoothing(0.4, 0.3), state, 2.0 * now, num_ticks=step)
    assert state.trend == pytest.approx(2.0, rel=1e-6)
