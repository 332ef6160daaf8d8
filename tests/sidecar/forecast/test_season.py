"""The season is found from the series alone, and not where there is none."""

from __future__ import annotations

import math
import random

import pytest

from sidecar.forecast import SmoothingForecaster
from sidecar.forecast.season import SeasonFinder


def found(values: list[float]) -> list[int | None]:
    """Every season that was ever believed in."""
    finder = SeasonFinder()
    return [finder.season_ticks for value in values if finder.observe(value, num_ticks=1.0)]


def seasonal(season: int, num: int, *, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [10 + 6 * math.sin(2 * math.pi * i / season) + rng.gauss(0, 2) for i in range(num)]


@pytest.mark.parametrize("season", [12, 20, 30, 45])
def test_a_season_is_found(season: int) -> None:
    assert found(seasonal(season, 2000)) == [season]


@pytest.mark.parametrize("season", [60, 90])
def test_a_long_season_is_found_within_a_tick(season: int) -> None:
    seen = found(seasonal(season, 4000))
    assert seen
    assert seen[-1] is not None
    assert abs(seen[-1] - season) <= 1


def test_neither_noise_nor_persistence_is_a_season() -> None:
    rng = random.Random(2)
    assert found([rng.gauss(0, 1) for _ in range(4000)]) == []
    level, walk = 0.0, []
    for _ in range(4000):
        level = 0.95 * level + rng.gauss(0, 1)
        walk.append(level)
    assert found(walk) == []
    assert found([3.0] * 2000) == []


def test_a_season_that_ends_is_forgotten() -> None:
    rng = random.Random(3)
    assert found([*seasonal(20, 2000), *(rng.gauss(10, 4) for _ in range(2500))]) == [20, None]


def test_holt_winters_takes_over_on_seasonal_traffic_and_goes_with_a_gap() -> None:
    forecaster = SmoothingForecaster(tick_s=1.0)
    values = seasonal(30, 2400)
    for i, value in enumerate(values):
        forecaster.observe(value, now_s=float(i))
    assert forecaster.season_s == 30.0
    assert forecaster.method(15.0) == "holt_winters"
    # Half a season ahead the sine is upside down.
    peak, trough = forecaster.predict(8.0), forecaster.predict(23.0)
    assert peak is not None
    assert trough is not None
    assert peak.point == pytest.approx(16, abs=2)
    assert trough.point == pytest.approx(4, abs=2)
    forecaster.observe(5.0, now_s=2400.0 + 120)
    assert forecaster.season_s is None
    assert forecaster.method(15.0) != "holt_winters"
