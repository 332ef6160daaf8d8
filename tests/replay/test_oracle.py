"""The best schedule against all schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.oracle import best_starts


@given(costs=st.lists(st.integers(0, 5), max_size=12), num=st.integers(0, 4), gap=st.integers(1, 4))
def test_nothing_costs_less(costs: list[int], num: int, gap: int) -> None:
    found = best_starts(costs, num_syncs=num, gap=gap)
    fitting = [
        picks
        for picks in itertools.combinations(range(len(costs)), len(found))
        if all(later - earlier >= gap for earlier, later in itertools.pairwise(picks))
    ]
    assert found in fitting
    assert sum(costs[i] for i in found) == min(sum(costs[i] for i in picks) for picks in fitting)
    most = 1 + (len(costs) - 1) // gap if costs else 0
    assert len(found) == min(num, most)


@pytest.mark.parametrize(
    ("costs", "num", "gap", "starts"),
    [
        ([3, 0, 3, 0, 3], 2, 2, (1, 3)),
        ([0, 0, 9, 9, 1], 2, 3, (0, 4)),
        ([1.0], 3, 5, (0,)),
        ([], 2, 1, ()),
    ],
)
def test_examples(costs: list[float], num: int, gap: int, starts: tuple[int, ...]) -> None:
    assert best_starts(costs, num_syncs=num, gap=gap) == starts
