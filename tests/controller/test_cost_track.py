"""What a group's past costs say about the next sync."""

from __future__ import annotations

import math
import random

import pytest

from controller.cost_track import LONGEST_S, SHORTEST_S, WINDOW_S, CostTrack, total


def on_off(seed: int, seconds: int) -> list[float]:
    """Bursts of some 6 s in lulls of some 13 s, Poisson counts within."""
    rng = random.Random(seed)
    costs, rate, left_s = [], 0.4, 0.0
    for _ in range(seconds):
        if left_s <= 0:
            rate = 10.0 if rate < 1 else 0.4
            left_s = rng.expovariate(1 / (6.0 if rate > 1 else 13.0))
        left_s -= 1
        count, threshold = 0, math.exp(-rate)
        product = rng.random()
        while product > threshold:
            count += 1
            product *= rng.random()
        costs.append(float(count))
    return costs


def feed(track: CostTrack, costs: list[float], *, sync_s: float = 3.0) -> list[float]:
    """The expectation at the end of each second."""
    found = []
    for cost in costs:
        track.observe(cost, sync_s=sync_s)
        assert track.expected_per_s is not None
        found.append(track.expected_per_s)
    return found


def test_a_constant_cost_is_expected_to_go_on() -> None:
    track = CostTrack()
    assert feed(track, [2.0] * 600)[-1] == pytest.approx(2.0, rel=0.02)


def test_at_first_it_goes_by_a_fast_average() -> None:
    assert feed(CostTrack(), [5.0, 0.0, 0.0]) == pytest.approx([5.0, 3.0, 1.8])


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_it_learns_how_bursts_go_on(seed: int) -> None:
    costs, sync_s = on_off(seed, 4000), 3
    expected = feed(CostTrack(), costs, sync_s=sync_s)
    later = [sum(costs[t + 1 : t + 1 + sync_s]) / sync_s for t in range(len(costs))]
    judged = sorted(range(1500, len(costs) - sync_s), key=lambda t: expected[t])
    calm, busy = judged[: len(judged) // 4], judged[-len(judged) // 4 :]
    mean = sum(later[t] for t in judged) / len(judged)
    # Bursts come without a warning: in the middle of a lull 1.6/s are to be expected, not the 0.4/s of the lull.
    assert sum(later[t] for t in calm) / len(calm) < 0.5 * mean
    assert sum(later[t] for t in busy) / len(busy) > 1.7 * mean
    # The square of a mean root lies under the mean.
    assert 0.6 * mean < sum(expected) / len(expected) < mean


def test_a_gap_is_not_learned_across() -> None:
    track = CostTrack()
    feed(track, [1.0] * 30)
    track.gap()
    assert track.expected_per_s is None
    before = len(track.recent)
    assert feed(track, [1.0])[0] == pytest.approx(1.0, rel=0.1)
    assert len(track.recent) == before + 1


def test_the_scale_of_the_costs_does_not_matter() -> None:
    costs = on_off(2, 1200)
    small, large = feed(CostTrack(), [c * 1e-3 for c in costs]), feed(CostTrack(), [c * 1e3 for c in costs])
    assert [value * 1e6 for value in small[-50:]] == pytest.approx(large[-50:], rel=1e-2, abs=1.0)


def test_the_window_is_bounded() -> None:
    track = CostTrack()
    feed(track, [1.0, 2.0] * WINDOW_S)
    assert len(track.recent) == WINDOW_S


@pytest.mark.parametrize(
    ("keeps", "low", "high"), [(0.0, SHORTEST_S, SHORTEST_S), (0.9, 6.5, 11.5), (0.99, LONGEST_S, LONGEST_S)]
)
def test_the_decorrelation_time_is_that_of_the_costs(keeps: float, low: float, high: float) -> None:
    rng, level, costs = random.Random(3), 0.0, []
    for _ in range(4000):
        level = keeps * level + math.sqrt(1 - keeps**2) * rng.gauss(0, 1)
        costs.append((5 + level) ** 2)
    track = CostTrack()
    feed(track, costs)
    assert low <= track.decorrelation_s <= high


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    assert total([1.0, 2.5]) == 3.5
    assert total([1.0, None]) is None
    assert total([]) == 0.0
