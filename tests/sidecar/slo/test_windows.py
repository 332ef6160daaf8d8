"""Sliding sums against all observations kept and added up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.slo.windows import NUM_BINS, SlidingSums

WINDOW_S = 60.0
GAPS_S = st.one_of(st.floats(0.0, 3.0), st.sampled_from([0.0, 1.0, 59.0, 60.0, 61.0, 3600.0]), st.floats(0.0, 200.0))
OBSERVATIONS = st.lists(st.tuples(GAPS_S, st.integers(0, 1000), st.integers(0, 9), st.booleans()), max_size=60)


@given(OBSERVATIONS, st.floats(0.0, 200.0), st.floats(0.0, 1e6), st.sampled_from([1.0, 5.0, 60.0]))
def test_the_sums_are_those_of_the_observations_in_the_window(
    observations: list[tuple[float, int, int, bool]], last_gap_s: float, start_s: float, bin_s: float
) -> None:
    window = SlidingSums(NUM_BINS * bin_s, 2)
    kept, now_s = [], start_s
    for gap_s, value, entered, begins_chain in observations:
        now_s += gap_s * bin_s
        window.add((float(value), 1.0), now_s=now_s, entered=float(entered), begins_chain=begins_chain)
        kept.append((now_s, value, entered, begins_chain))
    now_s += last_gap_s * bin_s
    newest = math.floor(now_s / bin_s)
    held = [(t, v, e, b) for t, v, e, b in kept if newest - NUM_BINS < math.floor(t / bin_s)]
    read = window.read(now_s=now_s)
    if not held:
        assert read is None
        return
    assert read is not None
    assert read.values == (sum(v for _, v, _, _ in held), len(held))
    assert read.entered == held[0][2] + sum(e for _, _, e, begins in held[1:] if begins)
    # Of the window as it slides, at most one bin is missing at its far end.
    assert read.values[1] >= sum(t > now_s - (NUM_BINS - 1) * bin_s for t, *_ in kept)
    assert read.values[1] <= sum(t >= now_s - NUM_BINS * bin_s for t, *_ in kept)


def test_memory_does_not_grow_with_time_or_rate() -> None:
    window = SlidingSums(WINDOW_S, 1)
    for tick in range(20_000):
        window.add((1.0,), now_s=tick * 0.01)
    assert len(window._bins) == NUM_BINS
    read = window.read(now_s=199.99)
    assert read is not None
    assert read.values == (6000.0,)


@pytest.mark.parametrize(("late_s", "total"), [(100.0, 3.0), (50.0, 3.0), (30.0, 1.0)])
def test_an_observation_out_of_order_counts_while_its_bin_is_held(late_s: float, total: float) -> None:
    window = SlidingSums(WINDOW_S, 1)
    window.add((1.0,), now_s=100.0)
    window.add((2.0,), now_s=late_s)
    read = window.read(now_s=100.0)
    assert read is not None
    assert read.values == (total,)


def test_nothing_observed_is_unknown_not_zero() -> None:
    window = SlidingSums(WINDOW_S, 1)
    assert window.read(now_s=5.0) is None
    window.add((0.0,), now_s=5.0)
    assert window.read(now_s=5.0) is not None
    assert window.read(now_s=66.0) is None
