"""Where the cost of now stands among those of the recent past, and what is foreseen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.policy.cost_view import mean_ahead, violations
from tests.controller.policy.views import costs


@pytest.mark.parametrize(
    ("now", "recent", "standing"),
    [
        (2.0, [1.0, 2.0, 3.0, 4.0], (0.25, 0.25)),
        (0.0, [0.0, 0.0, 0.0, 4.0], (0.0, 0.75)),
        (9.0, [1.0, 2.0], (1.0, 0.0)),
        (-1e-3, [-1e-3, 0.0], (0.0, 0.5)),
        (1.0, [1.0 + 1e-12, 1.0 - 1e-12], (0.0, 1.0)),
        (1.0, [], (0.0, 1.0)),
    ],
)
def test_standing(now: float, recent: list[float], standing: tuple[float, float]) -> None:
    assert costs(now, recent).standing() == standing


def test_quantiles() -> None:
    view = costs(0.0, [1.0, 2.0, 3.0, 4.0])
    assert [view.quantile_per_s(share) for share in (0.0, 0.25, 0.6, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert costs(5.0, []).quantile_per_s(0.5) == 5.0


@pytest.mark.parametrize(
    ("until_s", "mean"),
    [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (4.0, 5.0), (1e-9, 2.0)],
)
def test_the_mean_of_what_is_ahead(until_s: float, mean: float) -> None:
    # Rises from 2 to 6 within two seconds and stays there.
    assert mean_ahead([(0.0, 2.0), (2.0, 6.0)], until_s) == pytest.approx(mean)
    assert mean_ahead((), until_s) is None


@given(
    points=st.lists(st.tuples(st.floats(0.1, 20), st.floats(0, 100)), min_size=1, max_size=6),
    until_s=st.floats(0.1, 99),
)
def test_a_mean_lies_within_its_points(points: list[tuple[float, float]], until_s: float) -> None:
    start_s, ahead = 0.0, []
    for step_s, cost in points:
        ahead.append((start_s, cost))
        start_s += step_s
    found = mean_ahead(ahead, until_s)
    assert found is not None
    assert min(c for _, c in ahead) - 1e-9 <= found <= max(c for _, c in ahead) + 1e-9


def test_the_least_ahead_is_of_the_asked_for_times_alone() -> None:
    view = costs(0.0, [0.0], ahead_per_s=((0.0, 5.0), (5.0, 1.0), (30.0, 3.0), (60.0, 0.5)))
    assert view.least_ahead_per_s(5.0, 30.0) == 1.0
    assert view.least_ahead_per_s(10.0, 40.0) == 3.0
    assert view.least_ahead_per_s(31.0, 59.0) is None


def test_shown_violations_are_never_negative() -> None:
    assert violations(-0.5, 2.0) == 0.0
    assert violations(1.5, 2.0) == 3.0
