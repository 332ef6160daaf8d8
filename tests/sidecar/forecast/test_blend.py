"""The blend finds who is right, and draws forecasts to the mean only where that helps."""

from __future__ import annotations

import random

import pytest

from sidecar.forecast.blend import Blend


def taught(outcomes: list[tuple[list[float], float]], *, penalties: list[float], own_means: bool = False) -> Blend:
    blend = Blend(penalties, discount=0.999, overlap=1.0, own_means=own_means)
    for forecasts, outcome in outcomes:
        blend.learn(forecasts, outcome)
    return blend


def test_before_anything_is_known_the_penalties_decide_and_no_forecast_is_drawn() -> None:
    blend = Blend([1.0, 0.0], discount=0.999, overlap=1.0)
    assert blend.best == 1
    assert blend.combine([4.0, 4.0]) == pytest.approx(4.0)


def test_the_weight_goes_to_the_model_that_is_right_though_it_is_penalised() -> None:
    rng = random.Random(1)
    data = []
    for _ in range(300):
        truth = rng.gauss(10, 3)
        data.append(([rng.gauss(10, 3), truth + rng.gauss(0, 1)], truth))
    blend = taught(data, penalties=[0.0, 5.0])
    assert blend.best == 1
    assert blend.weights[1] > 0.99
    assert blend.combine([0.0, 12.0]) == pytest.approx(12.0, abs=0.5)


def test_a_forecast_that_says_nothing_is_drawn_to_the_mean() -> None:
    rng = random.Random(2)
    blend = taught([([rng.gauss(10, 3)], rng.gauss(10, 3)) for _ in range(1000)], penalties=[0.0])
    assert blend.combine([19.0]) == pytest.approx(10.0, abs=1.5)


def test_a_bias_counts_unless_means_are_the_models_own() -> None:
    rng = random.Random(3)
    data = []
    for _ in range(300):
        truth = rng.gauss(10, 2)
        data.append(([truth + 8 + rng.gauss(0, 0.5), truth + rng.gauss(0, 1)], truth))
    assert taught(data, penalties=[0.0, 0.0]).best == 1
    assert taught(data, penalties=[0.0, 0.0], own_means=True).best == 0


def test_a_model_that_comes_begins_with_the_record_of_the_best() -> None:
    blend = taught([([0.0, 1.0 * i], 1.0 * i) for i in range(50)], penalties=[0.0, 0.0])
    blend.resize([0.0, 0.0, 0.0])
    assert blend.weights == pytest.approx([0.0, 0.5, 0.5], abs=1e-3)
    blend.resize([0.0, 0.0])
    assert blend.weights == pytest.approx([0.0, 1.0], abs=1e-3)
