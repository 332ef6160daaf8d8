"""Bursts: their level, their probability, and what holes in the series make of both."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.forecast import HORIZONS_S, BurstForecast, BurstForecaster, SmoothingForecaster
from sidecar.forecast.percentile import Percentile, bucket_of, edge_of


def fed(rates: list[float], *, tick_s: float = 1.0) -> BurstForecaster:
    bursts = BurstForecaster(tick_s=tick_s, horizons_s=HORIZONS_S)
    for i, rate in enumerate(rates):
        bursts.observe(rate, interval_s=tick_s, now_s=i * tick_s)
    return bursts


def predict(bursts: BurstForecaster, horizon_s: float) -> BurstForecast:
    forecast = bursts.predict(horizon_s)
    assert forecast is not None
    return forecast


def on_off(num: int, *, seed: int = 1) -> list[float]:
    """Bursts of about 10 s at 20/s between lulls of about 30 s."""
    rng = random.Random(seed)
    on, rates = False, []
    for _ in range(num):
        if rng.random() < (0.1 if on else 0.033):
            on = not on
        rates.append(float(rng.randint(15, 25)) if on else 0.0)
    return rates


def test_nothing_is_said_before_the_horizon_has_passed_once() -> None:
    bursts = fed([1.0] * 10)
    assert bursts.predict(5.0) is not None
    assert bursts.predict(30.0) is None


def test_a_horizon_that_is_not_tracked_has_no_burst_forecast() -> None:
    assert fed([1.0] * 100).predict(7.0) is None


def test_the_level_is_the_90th_percentile_of_the_sums() -> None:
    rates = on_off(6000)
    sums = sorted(sum(rates[i : i + 5]) for i in range(len(rates) - 5))
    assert predict(fed(rates), 5.0).level == pytest.approx(sums[int(0.9 * len(sums))], rel=0.08)


def test_a_burst_is_more_probable_within_one_than_in_a_lull() -> None:
    rates = on_off(3000)
    lull, burst = fed([*rates, *[0.0] * 20]), fed([*rates, *[20.0] * 5])
    assert predict(lull, 5.0).probability < 0.1
    assert predict(burst, 5.0).probability > 3 * predict(lull, 5.0).probability


def test_an_idle_server_has_a_burst_level_of_one_request() -> None:
    assert predict(fed([0.0] * 400), 5.0).level == 1.0


def test_the_sum_does_not_depend_on_the_ticks_that_it_is_seen_in() -> None:
    bursts = BurstForecaster(tick_s=1.0, horizons_s=(5.0,))
    rng, now_s = random.Random(4), 0.0
    for _ in range(800):
        step_s = rng.choice([0.5, 1.0, 1.3, 2.0])
        now_s += step_s
        bursts.observe(4.0, interval_s=step_s, now_s=now_s)
    assert predict(bursts, 5.0).level == pytest.approx(20.0, rel=0.041)


def test_no_sum_spans_a_hole() -> None:
    bursts = BurstForecaster(tick_s=1.0, horizons_s=(5.0,))
    for i in range(3000):
        # An interval of every seven is unknown: whatever came in it, sums of 4/s over 5 s are 20.
        if i % 7:
            bursts.observe(4.0, interval_s=1.0, now_s=float(i))
    assert predict(bursts, 5.0).level == pytest.approx(20.0, rel=0.041)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_near_poisson_traffic_is_judged_by_the_smoothest_level_alone(seed: int) -> None:
    rng = random.Random(seed)
    # As good as Poisson: many that are rarely there.
    bursts = fed([float(sum(rng.random() < 0.1 for _ in range(60))) for _ in range(900)])
    assert all(track.blend.weights[0] > 0.95 for track in bursts.tracks)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bursts_are_judged_by_what_was_learned_of_them(seed: int) -> None:
    bursts = fed(on_off(900, seed=seed))
    assert all(track.blend.weights[0] < 0.3 for track in bursts.tracks)


def test_after_a_gap_the_probability_is_that_of_the_new_rate() -> None:
    rates = on_off(3000)
    bursts = fed([*rates, *[20.0] * 5])
    bursts.observe(0.0, interval_s=1.0, now_s=5000.0)
    assert predict(bursts, 5.0).probability < 0.1


@settings(deadline=None, max_examples=60)
@given(
    rates=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=120),
    steps_s=st.lists(st.floats(-1.0, 200.0), min_size=120, max_size=120),
)
def test_probabilities_are_probabilities_whatever_comes(rates: list[float], steps_s: list[float]) -> None:
    bursts = BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    now_s = 0.0
    for rate, step_s in zip(rates, steps_s, strict=False):
        now_s += step_s
        bursts.observe(rate, interval_s=1.0, now_s=now_s)
        for horizon_s in HORIZONS_S:
            forecast = bursts.predict(horizon_s)
            assert forecast is None or (0 < forecast.probability < 1 and 1 <= forecast.level < math.inf)


def test_a_seasonal_burst_is_seen_half_a_season_ahead() -> None:
    rng = random.Random(5)
    forecaster, bursts = SmoothingForecaster(tick_s=1.0), BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    for i in range(3000):
        # 3000 is the beginning of a season: 15 s of calm, then 15 s of rush.
        rate = (20.0 if i % 30 >= 15 else 2.0) + rng.random()
        forecaster.observe(rate, now_s=float(i))
        bursts.observe(rate, interval_s=1.0, now_s=float(i), seasonal_mean=forecaster.seasonal_mean)
        if i in {2983, 2998}:
            forecast = bursts.predict(15.0, seasonal_mean=forecaster.seasonal_mean)
            assert forecast is not None
            assert (forecast.probability > 0.2) == (i == 2983)


def test_what_is_no_rate_is_ignored() -> None:
    bursts = BurstForecaster(tick_s=1.0, horizons_s=(1.0,))
    bursts.observe(math.nan, interval_s=1.0, now_s=1.0)
    bursts.observe(-1.0, interval_s=1.0, now_s=2.0)
    bursts.observe(1.0, interval_s=0.0, now_s=3.0)
    assert bursts.predict(1.0) is None


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, 7.0, 40.0, 1234.0, 1e6])
def test_a_bucket_holds_its_value_within_its_width(value: float) -> None:
    edge = edge_of(bucket_of(value))
    assert edge <= value + 1e-9
    assert value <= edge * 1.04 + 1e-9


def test_the_percentile_follows_a_change() -> None:
    percentile = Percentile(0.9, discount=0.99)
    for i in range(2000):
        percentile.add(float(i % 10))
    assert percentile.value == pytest.approx(8.0, rel=0.041)
    for i in range(2000):
        percentile.add(100.0 + i % 10)
    assert percentile.value == pytest.approx(108.0, rel=0.041)
