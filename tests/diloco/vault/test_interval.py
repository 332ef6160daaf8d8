"""The interval between snapshots follows what they cost."""

from __future__ import annotations

import pytest

from diloco.vault.interval import MAX_INTERVAL, Interval


def settled(cost_s: float, step_s: float) -> Interval:
    interval = Interval()
    for _ in range(20):
        interval.take_step(step_s)
        interval.take_cost(cost_s)
    return interval


@pytest.mark.parametrize(
    ("cost_ms", "steps"), [(0.0, 1), (9.9, 1), (10.1, 2), (75.0, 8), (5000.0, MAX_INTERVAL)], ids=str
)
def test_it_is_the_shortest_within_a_hundredth(cost_ms: float, steps: int) -> None:
    interval = settled(cost_ms / 1e3, 1.0)
    assert interval.steps == steps
    if steps < MAX_INTERVAL:
        assert interval.overhead is not None
        assert interval.overhead <= 0.01


def test_one_hiccup_moves_nothing() -> None:
    interval = settled(0.005, 1.0)
    assert not interval.take_cost(3.0)
    assert interval.steps == 1


def test_around_a_limit_it_does_not_go_back_and_forth() -> None:
    interval = settled(0.0105, 1.0)
    changes = 0
    for i in range(100):
        interval.take_step(1.0)
        changes += interval.take_cost(0.0105 if i % 20 < 10 else 0.0095)
    assert interval.steps == 2
    assert changes == 0


def test_it_gets_shorter_when_snapshots_get_cheap() -> None:
    interval = settled(0.2, 1.0)
    assert interval.steps == 20
    for _ in range(20):
        interval.take_cost(0.001)
    assert interval.steps == 1


def test_nothing_is_known_before_a_step() -> None:
    interval = Interval()
    assert not interval.take_cost(1.0)
    assert (interval.steps, interval.overhead) == (1, None)
