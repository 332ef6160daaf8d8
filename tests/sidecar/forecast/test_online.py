"""The online forecaster: choice of the model, calibrated quantiles, and its regimes by invariants."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.forecast import HORIZONS_S, Forecaster, Prediction, SmoothingForecaster
from sidecar.forecast.online import GAP_S
from sidecar.forecast.residuals import quantile

ALL_HORIZONS_S = (0.5, *HORIZONS_S, 7.0)


def fed(values: list[float], *, tick_s: float = 1.0, start_s: float = 100.0) -> SmoothingForecaster:
    forecaster = SmoothingForecaster(tick_s=tick_s)
    for i, value in enumerate(values):
        forecaster.observe(value, now_s=start_s + i * tick_s)
    return forecaster


def predict(forecaster: Forecaster, horizon_s: float) -> Prediction:
    prediction = forecaster.predict(horizon_s)
    assert prediction is not None
    return prediction


def poisson(rng: random.Random, mean: float) -> float:
    count, product, limit = -1, 1.0, math.exp(-mean)
    while product > limit:
        count, product = count + 1, product * rng.random()
    return float(count)


def test_nothing_is_predicted_before_the_first_observation() -> None:
    assert SmoothingForecaster(tick_s=1.0).predict(1.0) is None


def test_after_one_observation_the_spread_is_that_of_a_count() -> None:
    prediction = predict(fed([4.0]), 5.0)
    assert prediction.point == prediction.q50 == pytest.approx(4.0)
    assert prediction.q90 == pytest.approx(4.0 + 1.2816 * 2)
    assert prediction.q10 == pytest.approx(4.0 - 1.2816 * 2)


def test_an_idle_server_is_not_said_to_be_idle_for_certain_before_residuals_are_known() -> None:
    assert predict(fed([0.0]), 1.0).q90 > 1.0
    assert predict(fed([0.0] * 60), 1.0).q90 == 0.0


def test_holt_is_chosen_on_a_ramp_and_follows_it() -> None:
    forecaster = fed([2.0 * i for i in range(100)])
    assert forecaster.method(1.0) == "holt"
    assert predict(forecaster, 10.0).point == pytest.approx(198 + 20, rel=0.02)


def test_simple_is_chosen_on_noise_around_a_level() -> None:
    rng = random.Random(5)
    forecaster = fed([poisson(rng, 6.0) for _ in range(400)])
    assert forecaster.method(1.0) == "simple"
    assert predict(forecaster, 30.0).point == pytest.approx(6.0, abs=2.0)


def test_the_choice_follows_a_change() -> None:
    rng = random.Random(6)
    noise = [50 + rng.gauss(0, 3) for _ in range(300)]
    forecaster = fed([*noise, *(50 + 5.0 * i for i in range(200))])
    assert forecaster.method(1.0) == "holt"


@pytest.mark.parametrize("horizon_s", HORIZONS_S)
def test_quantiles_are_calibrated_on_poisson_counts(horizon_s: float) -> None:
    rng = random.Random(7)
    forecaster = SmoothingForecaster(tick_s=1.0)
    values = [poisson(rng, 8.0) for _ in range(1500)]
    predictions = []
    for i, value in enumerate(values):
        forecaster.observe(value, now_s=float(i))
        predictions.append(predict(forecaster, horizon_s))
    ahead = int(horizon_s)
    pairs = list(zip(predictions[200:-ahead], values[200 + ahead :], strict=True))
    # Of a count with ties, P(X < q) <= p <= P(X <= q); 1300 draws, and a tenth of slack for the moving level.
    assert sum(v < p.q90 for p, v in pairs) / len(pairs) <= 0.95
    assert sum(v <= p.q90 for p, v in pairs) / len(pairs) >= 0.85
    assert sum(v < p.q10 for p, v in pairs) / len(pairs) <= 0.15
    assert 0.4 <= sum(v <= p.q50 for p, v in pairs) / len(pairs) <= 0.65


def test_a_horizon_without_residuals_borrows_those_of_a_shorter_one() -> None:
    rng = random.Random(8)
    # 14 observations are 12 residuals 2 s ahead and under 10 residuals 5 s ahead.
    forecaster = fed([10 + rng.gauss(0, 1) for _ in range(14)])
    near, far = predict(forecaster, 2.0), predict(forecaster, 30.0)
    assert far.q90 - far.point == pytest.approx(math.sqrt(15) * (near.q90 - near.point), rel=0.01)


def test_after_a_gap_the_level_is_the_new_value() -> None:
    forecaster = fed([2.0 * i for i in range(50)])
    forecaster.observe(3.0, now_s=100.0 + 49 + 2 * GAP_S)
    assert predict(forecaster, 1.0).point == pytest.approx(3.0, abs=0.5)


def test_predictions_that_met_a_gap_are_not_held_against_the_model() -> None:
    forecaster = fed([5.0] * 60)
    forecaster.observe(500.0, now_s=100.0 + 59 + 2 * GAP_S)
    # The residuals before the gap are near 0, the one across it would be 495.
    assert predict(forecaster, 1.0).q90 < 550.0


@pytest.mark.parametrize("now_s", [159.0, 150.0])
def test_time_that_does_not_advance_is_ignored(now_s: float) -> None:
    forecaster = fed([5.0] * 60)
    before = predict(forecaster, 1.0)
    forecaster.observe(500.0, now_s=now_s)
    assert predict(forecaster, 1.0) == before
    assert forecaster.num_observations == 60


def test_what_is_no_number_is_ignored() -> None:
    forecaster = fed([5.0])
    forecaster.observe(math.nan, now_s=200.0)
    forecaster.observe(math.inf, now_s=201.0)
    assert forecaster.num_observations == 1


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=80),
    steps_s=st.lists(st.floats(0.01, 200.0), min_size=80, max_size=80),
    tick_s=st.sampled_from([0.1, 1.0, 15.0]),
)
def test_quantiles_are_ordered_finite_and_never_negative(
    values: list[float], steps_s: list[float], tick_s: float
) -> None:
    forecaster = SmoothingForecaster(tick_s=tick_s)
    now_s = 0.0
    for value, step_s in zip(values, steps_s, strict=False):
        now_s += step_s
        forecaster.observe(value, now_s=now_s)
        for horizon_s in ALL_HORIZONS_S:
            p = predict(forecaster, horizon_s)
            assert 0 <= p.q10 <= p.q50 <= p.q90 < math.inf
            assert 0 <= p.point < math.inf


@pytest.mark.parametrize("tick_s", [0.1, 1.0, 15.0])
def test_memory_is_bounded(tick_s: float) -> None:
    rng = random.Random(9)
    forecaster = SmoothingForecaster(tick_s=tick_s)
    for i in range(4_000):
        forecaster.observe(rng.random() * 20, now_s=i * tick_s)
    assert len(pickle.dumps(forecaster)) < 65_536


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantiles_are_linear_between_neighbours(probability: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], probability) == pytest.approx(expected)


def contract_of(make: Callable[[], Forecaster]) -> None:
    forecaster = make()
    assert forecaster.predict(1.0) is None
    forecaster.observe(1.0, now_s=0.0)
    assert forecaster.num_observations == 1
    assert forecaster.method(1.0)
    assert forecaster.predict(1.0) is not None


def test_the_forecaster_meets_the_interface() -> None:
    contract_of(lambda: SmoothingForecaster(tick_s=1.0))
