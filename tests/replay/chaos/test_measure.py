"""What a fault cost, from samples whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replay.chaos.measure import (
    Blow,
    Sample,
    advances,
    counted_s,
    furthest,
    goodput_frac,
    growth_mb_per_min,
    longest_gap_s,
    steps_lost,
    trains_again_s,
    usual_gap_s,
)


def sample(
    t_s: float, step: int, *, since_sync: int = 0, round_: int = 0, pid: int = 10, instance: str = "a"
) -> Sample:
    return Sample(
        t_s=t_s, agent_id=instance, instance=instance, pids=(pid,), step=step, since_sync=since_sync, round=round_
    )


def steady(begin_s: int, end_s: int, *, first: int = 0, pid: int = 10, instance: str = "a") -> list[Sample]:
    """A step a second."""
    return [
        sample(float(t_s), first + t_s - begin_s, since_sync=first + t_s - begin_s, pid=pid, instance=instance)
        for t_s in range(begin_s, end_s)
    ]


KILL = Blow(t_s=9.5, over_s=9.5, pid=10)


def test_a_worker_that_goes_on_from_its_last_step_has_lost_nothing() -> None:
    seen = [*steady(0, 10), sample(13.0, 9, since_sync=9, pid=11), sample(14.0, 10, since_sync=10, pid=11)]
    assert trains_again_s(seen, KILL) == 14.0
    assert steps_lost(seen, KILL) == 0


def test_a_step_that_was_taken_before_and_heard_after_is_no_recovery() -> None:
    seen = [*steady(0, 10), sample(9.6, 10, since_sync=10)]
    assert trains_again_s(seen, KILL) is None
    seen += [sample(12.0, 10, since_sync=10, pid=11), sample(13.0, 11, since_sync=11, pid=11)]
    assert trains_again_s(seen, KILL) == 13.0


def test_steps_that_are_taken_again_are_lost() -> None:
    again = [sample(12.0 + index, 6 + index, since_sync=6 + index, pid=11) for index in range(5)]
    assert steps_lost([*steady(0, 10), *again], KILL) == 3
    assert trains_again_s([*steady(0, 10), *again], KILL) == 16.0


@pytest.mark.parametrize("round_", [0, 1])
def test_work_that_is_dropped_while_the_count_goes_on_is_lost(round_: int) -> None:
    seen = [
        *steady(0, 10),
        sample(13.0, 9, since_sync=0, round_=round_, pid=11),
        sample(14.0, 10, since_sync=1, pid=11),
    ]
    assert steps_lost(seen, KILL) == 9


def test_work_that_is_told_to_be_gone_before_the_worker_is_lost_all_the_same() -> None:
    told = sample(9.7, 9, since_sync=0)
    seen = [*steady(0, 10), told, sample(13.0, 9, since_sync=0, pid=11), sample(14.0, 10, since_sync=1, pid=11)]
    assert steps_lost(seen, KILL) == 9
    # What a sync took in is not lost.
    synced = replace(told, round=1)
    assert steps_lost([*steady(0, 10), synced, *seen[-2:]], KILL) == 0


def test_a_worker_without_pids_yet_is_not_the_new_one() -> None:
    empty = replace(sample(11.0, 12), pids=())
    assert trains_again_s([*steady(0, 10), empty], KILL) is None


def test_another_agent_takes_the_slot_of_one_that_was_killed() -> None:
    blow = Blow(t_s=9.5, over_s=9.5, pid=10, instance="a")
    late = sample(9.6, 10, since_sync=10)
    seen = [*steady(0, 10), late, sample(15.0, 8, pid=20, instance="b"), sample(18.0, 11, pid=20, instance="b")]
    assert trains_again_s(seen, blow) == 18.0
    assert steps_lost(seen, blow) == 10


def test_one_that_stood_still_goes_on_by_itself() -> None:
    blow = Blow(t_s=9.5, over_s=14.5, pid=10, undone=True)
    seen = [*steady(0, 10), *steady(15, 18, first=10)]
    assert trains_again_s(seen, blow) == 15.0
    assert steps_lost(seen, blow) == 0
    assert trains_again_s(seen, replace(blow, undone=False)) is None


def test_gaps_reach_from_the_beginning_to_the_end_of_what_is_asked() -> None:
    seen = [*steady(0, 10), *steady(15, 20, first=10)]
    assert longest_gap_s(seen, since_s=0.0, until_s=19.0) == 6.0
    assert longest_gap_s(seen, since_s=12.0, until_s=13.5) == 1.5
    assert longest_gap_s(seen, since_s=0.0, until_s=30.0) == 11.0
    assert usual_gap_s(seen) == 1.0
    assert usual_gap_s(seen[:1]) is None


def test_only_steps_beyond_all_before_advance() -> None:
    seen = [sample(0, 1), sample(1, 2), sample(2, 1), sample(3, 2), sample(4, 3)]
    assert advances(seen) == [0, 1, 4]
    assert (furthest(seen, until_s=2.5), furthest(seen, until_s=-1)) == (2, -1)


def test_goodput_is_the_share_of_the_time_in_which_steps_counted() -> None:
    whole = steady(0, 101)
    halted = [*steady(0, 51), *steady(80, 101, first=51)]
    assert goodput_frac([whole], since_s=0, until_s=100, lost=[0]) == 1.0
    # 50 s before the halt, 20 s after it, the 30 s between do not count.
    assert goodput_frac([halted], since_s=0, until_s=100, lost=[0]) == pytest.approx(0.7)
    assert goodput_frac([whole, halted], since_s=0, until_s=100, lost=[0, 0]) == pytest.approx(0.85)
    assert goodput_frac([whole], since_s=0, until_s=100, lost=[25]) == pytest.approx(0.75)
    assert goodput_frac([], since_s=0, until_s=100, lost=[]) == 0.0
    assert counted_s([], since_s=0, until_s=1, lost=0) == 0.0


def test_growth_is_told_from_when_a_process_has_started() -> None:
    loading = [(float(t_s), 10.0 * t_s) for t_s in range(20)]
    growing = [(float(t_s), 200.0 + 0.5 * t_s) for t_s in range(20, 60)]
    assert growth_mb_per_min([*loading, *growing]) == pytest.approx(30.0)
    assert growth_mb_per_min(loading) is None
    assert growth_mb_per_min([]) is None
