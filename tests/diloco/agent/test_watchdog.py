"""When a worker is taken for dead."""

from __future__ import annotations

import pytest

from diloco.agent.watchdog import START_S, Watchdog, cpu_seconds
from diloco.protocol import AliveEvent

T = 10.0
BEAT_S = 1.0


def alive(*, still_s: float = 0.0, waits: bool = False, step_time_s: float | None = 0.1) -> AliveEvent:
    return AliveEvent(step=7, still_s=still_s, waits=waits, step_time_s=step_time_s)


def killed_at(watchdog: Watchdog, *, until_s: float, cpu_rate: float = 0.0, since_s: float = 0.0) -> float | None:
    """Tick on, in silence; when the worker is killed."""
    now_s = since_s
    while now_s < until_s:
        now_s += watchdog.period_s
        if watchdog.tick([cpu_rate * now_s] * watchdog.num_ranks, now_s=now_s) is not None:
            return now_s
    return None


def spoken(num_ranks: int = 1) -> Watchdog:
    watchdog = Watchdog(num_ranks, timeout_s=T, now_s=0.0)
    for rank in range(num_ranks):
        watchdog.hear(rank, alive(), now_s=0.0)
    return watchdog


def test_a_stopped_worker_is_silent_and_dead_after_the_timeout() -> None:
    assert killed_at(spoken(), until_s=100.0) == pytest.approx(T)


def test_a_silent_one_that_computes_has_twice_as_long() -> None:
    assert killed_at(spoken(), until_s=100.0, cpu_rate=0.5) == pytest.approx(2 * T)


def test_a_start_may_take_minutes() -> None:
    assert killed_at(Watchdog(1, timeout_s=T, now_s=0.0), until_s=400.0) == pytest.approx(START_S)


@pytest.mark.parametrize(
    ("event", "dies"),
    [
        (alive(still_s=2 * T - 0.1), False),
        (alive(still_s=2 * T), True),
        (alive(still_s=1000.0, waits=True), False),
        (alive(still_s=90.0, step_time_s=10.0), False),
        (alive(still_s=100.0, step_time_s=10.0), True),
    ],
    ids=["not-yet", "hangs", "waits", "slow-steps", "slow-and-hangs"],
)
def test_no_progress_counts_without_a_reason_alone(event: AliveEvent, dies: bool) -> None:
    watchdog = spoken()
    watchdog.hear(0, event, now_s=1.0)
    found = watchdog.tick([None], now_s=1.0)
    assert (found is not None) == dies
    if found is not None:
        assert found[0] == 0
        assert "no progress" in found[1]


def test_the_agents_own_standstill_counts_for_nobody() -> None:
    watchdog = spoken(2)
    watchdog.tick([None, None], now_s=1.0)
    assert watchdog.tick([None, None], now_s=500.0) is None
    watchdog.hear(1, alive(), now_s=501.0)
    assert killed_at(watchdog, until_s=600.0, since_s=500.0) is not None


def test_the_silent_one_of_two_is_named() -> None:
    watchdog = spoken(2)
    now_s = 0.0
    found = None
    while found is None and now_s < 3 * T:
        now_s += watchdog.period_s
        watchdog.hear(0, alive(), now_s=now_s)
        found = watchdog.tick([None, None], now_s=now_s)
    assert found is not None
    assert found[0] == 1
    assert now_s < 3 * T


def test_processor_time_is_read_from_names_with_brackets() -> None:
    assert cpu_seconds("7 (a) b) R 1 1 1 0 -1 4 0 0 0 0 250 50 0 0 20 0", ticks_per_s=100) == pytest.approx(3.0)
    assert cpu_seconds("", ticks_per_s=100) is None
