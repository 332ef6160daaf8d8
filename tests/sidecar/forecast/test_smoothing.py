"""Smoothing against statsmodels on the same series, and on ticks of other lengths."""

from __future__ import annotations

import math
import random

import pytest
from statsmodels.tsa.holtwinters import ExponentialSmoothing, Holt, SimpleExpSmoothing

from sidecar.forecast.experts import ALPHAS, TRENDS, Experts, trend_reaches
from sidecar.forecast.seasonal import HoltWinters, Seasonal, initial_seasons
from sidecar.forecast.smoothing import Level, Smoothing, decay, update


def series(seed: int, num: int = 120) -> list[float]:
    rng = random.Random(seed)
    return [max(0.0, 5 + 4 * math.sin(i / 9) + rng.gauss(0, 1)) for i in range(num)]


def run(model: Smoothing, values: list[float], start: Level) -> tuple[list[float], Level]:
    """One-step forecasts of every value, and the last state."""
    fitted = []
    state = start
    for value in values:
        fitted.append(state.after(1.0, phi=model.phi))
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


@pytest.mark.parametrize(("alpha", "beta", "phi"), [(0.2, 0.1, 0.95), (0.6, 0.2, 0.85)])
@pytest.mark.parametrize("seed", [1, 2])
def test_damped_holt_is_that_of_statsmodels(alpha: float, beta: float, phi: float, seed: int) -> None:
    values = series(seed)
    reference = Holt(
        values, damped_trend=True, initialization_method="known", initial_level=values[0], initial_trend=0.0
    ).fit(smoothing_level=alpha, smoothing_trend=beta, damping_trend=phi, optimized=False)
    fitted, state = run(Smoothing(alpha, beta, phi), values, Level(values[0]))
    assert fitted == pytest.approx(list(reference.fittedvalues), rel=1e-9)
    ahead = [state.after(h, phi=phi) for h in (1, 5, 30)]
    assert ahead == pytest.approx([reference.forecast(h)[-1] for h in (1, 5, 30)])


@pytest.mark.parametrize("model", [Seasonal(0.05, 0.001, 0.1), Seasonal(0.3, 0.1, 0.2)])
@pytest.mark.parametrize("season", [7, 24])
def test_holt_winters_is_that_of_statsmodels(model: Seasonal, season: int) -> None:
    values = series(3, 150)
    level, seasons = initial_seasons(values[:48], season)
    reference = ExponentialSmoothing(
        values,
        trend="add",
        seasonal="add",
        seasonal_periods=season,
        initialization_method="known",
        initial_level=level,
        initial_trend=0.0,
        initial_seasonal=seasons,
    ).fit(smoothing_level=model.alpha, smoothing_trend=model.beta, smoothing_seasonal=model.gamma, optimized=False)
    state = HoltWinters(model, seasons, level=level, tick=-1.0)
    fitted = []
    for value in values:
        fitted.append(state.after(1.0))
        state.observe(value, num_ticks=1.0)
    assert fitted == pytest.approx(list(reference.fittedvalues), rel=1e-9)
    assert [state.after(h) for h in (1, 5, 30)] == pytest.approx([reference.forecast(h)[-1] for h in (1, 5, 30)])


@pytest.mark.parametrize("num_ticks", [1, 3, 7, 20, 60])
def test_the_mean_ahead_is_that_of_the_values_ahead(num_ticks: int) -> None:
    state = HoltWinters(Seasonal(0.1, 0.01, 0.1), [3.0, -1.0, 0.5, 2.0, -4.5, 0.0, 1.0], level=9.0, trend=0.2, tick=4.0)
    ahead = [state.after(float(i)) for i in range(1, num_ticks + 1)]
    assert state.mean(float(num_ticks)) == pytest.approx(sum(ahead) / num_ticks)


@pytest.mark.parametrize("num_ticks", [1.0, 0.3, 4.0])
def test_the_pool_of_models_advances_as_its_members_do(num_ticks: float) -> None:
    values = series(4)
    experts = Experts()
    experts.restart(values[0])
    models = [*(Smoothing(alpha) for alpha in ALPHAS), *TRENDS]
    states = [Level(values[0])] * len(models)
    for value in values[1:]:
        experts.observe(value, num_ticks=num_ticks)
        states = [update(m, s, value, num_ticks=num_ticks) for m, s in zip(models, states, strict=True)]
    expected = [s.after(5.0, phi=m.phi) for m, s in zip(models, states, strict=True)]
    assert experts.forecast(5.0, trend_reaches(5.0)) == pytest.approx(expected)


@pytest.mark.parametrize("model", [Smoothing(0.3), Smoothing(0.3, 0.1), Smoothing(0.3, 0.1, 0.9)])
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
