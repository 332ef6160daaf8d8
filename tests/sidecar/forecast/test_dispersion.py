"""The Allan factor tells bursts from Poisson arrivals, whatever the rate does slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from sidecar.forecast.dispersion import DISCOUNT, WINDOW_S, Dispersion


def fed(counts: NDArray[np.int64] | NDArray[np.float64], *, interval_s: float = 1.0) -> Dispersion:
    dispersion = Dispersion()
    for count in counts.tolist():
        dispersion.add(float(count), interval_s=interval_s)
    return dispersion


def test_it_is_what_the_definition_says() -> None:
    windows = np.array([23, 45, 12])
    counts = np.repeat(windows, int(WINDOW_S)) / WINDOW_S
    dispersion = fed(counts)
    weights = np.array([DISCOUNT, 1.0])
    squares = float(weights @ np.diff(windows) ** 2)
    arrivals = float(weights @ (windows[1:] + windows[:-1]))
    assert dispersion.allan == pytest.approx((squares + 1) / (arrivals + 1))


@pytest.mark.parametrize("rate_per_s", [0.1, 2.0, 50.0])
def test_poisson_arrivals_of_any_rate_have_one(rate_per_s: float) -> None:
    counts = np.random.default_rng(1).poisson(rate_per_s, size=7200)
    assert fed(counts).allan == pytest.approx(1.0, abs=0.3)


def test_a_rate_that_drifts_is_not_dispersion() -> None:
    rates = 6.0 * np.exp(0.5 * np.sin(2 * math.pi * np.arange(7200) / 3600))
    counts = np.random.default_rng(2).poisson(rates)
    assert counts.reshape(-1, 10).sum(axis=1).var() / (10 * counts.mean()) > 5
    assert fed(counts).allan == pytest.approx(1.0, abs=0.3)


def test_bursts_have_much_more_and_a_metronome_none() -> None:
    rates = np.where(np.arange(3600) % 20 < 6, 10.0, 0.4)
    assert fed(np.random.default_rng(3).poisson(rates)).allan > 5
    assert fed(np.full(3600, 4)).allan < 0.01


def test_windows_of_unequal_length_are_compared_as_rates() -> None:
    rng, dispersion = np.random.default_rng(4), Dispersion()
    for _ in range(7200):
        interval_s = float(rng.choice([0.5, 1.0, 3.0, 20.0]))
        dispersion.add(float(rng.poisson(4.0 * interval_s)), interval_s=interval_s)
    assert dispersion.allan == pytest.approx(1.0, abs=0.3)


def test_windows_on_both_sides_of_a_hole_are_no_neighbours() -> None:
    dispersion = fed(np.full(100, 4))
    before = dispersion.squares
    dispersion.add(1000.0, interval_s=1.0)
    dispersion.restart()
    for _ in range(10):
        dispersion.add(400.0, interval_s=1.0)
    assert dispersion.squares <= before


def test_an_idle_server_is_taken_for_poisson() -> None:
    assert fed(np.zeros(600)).allan == 1.0
