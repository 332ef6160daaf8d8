"""The cadence: slow answers lengthen the interval, within bounds, and it returns by itself."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.source.cadence import MAX_SHARE, next_interval_s


def intervals(*durations_s: float, usual_s: float = 1.0, longest_s: float = 5.0) -> list[float]:
    def step(interval_s: float, duration_s: float) -> float:
        return next_interval_s(interval_s, duration_s, usual_s=usual_s, longest_s=longest_s)

    return list(accumulate(durations_s, step, initial=usual_s))


@pytest.mark.parametrize(
    ("durations_s", "expected_s"),
    [
        ([0.01, 0.01, 0.01], [1, 1, 1, 1]),
        ([0.2, 0.2], [1, 1, 1]),
        ([0.3, 0.3], [1, 1.5, 1.5]),
        ([1.0, 1.0, 1.0, 1.0], [1, 2, 4, 5, 5]),
        ([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1, 2, 4, 5, 2.5, 1.25, 1]),
        ([60.0, 0.0], [1, 2, 1]),
    ],
)
def test_the_interval_follows_the_duration_of_the_scrapes(durations_s: list[float], expected_s: list[float]) -> None:
    assert intervals(*durations_s) == pytest.approx(expected_s)


def test_a_longest_interval_that_is_the_usual_one_switches_it_off() -> None:
    assert intervals(9.0, 9.0, longest_s=1.0) == [1.0, 1.0, 1.0]


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.1, 60), st.floats(1, 10))
def test_it_stays_within_bounds_and_settles_at_the_share(
    durations_s: list[float], usual_s: float, times: float
) -> None:
    longest_s = usual_s * times
    seen = intervals(*durations_s, usual_s=usual_s, longest_s=longest_s)
    assert all(usual_s <= interval_s <= longest_s for interval_s in seen)
    steady_s = durations_s[-1] if durations_s else 0.0
    settled_s = intervals(*durations_s, *([steady_s] * 20), usual_s=usual_s, longest_s=longest_s)[-1]
    assert settled_s == pytest.approx(min(max(steady_s / MAX_SHARE, usual_s), longest_s))
