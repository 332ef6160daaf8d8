"""The pace of an island is what its heartbeats show, waits included."""

from __future__ import annotations

from typing import Any

from controller.paces import LEAST_S, WINDOW_S, Paces
from controller.records import AgentRecord, Membership
from tests.controller.helpers import START_S, progress


def island(slot: int, *, step: int, told_s: float) -> AgentRecord:
    fields: dict[str, Any] = dict.fromkeys(("server_id", "url", "num_parameters"))
    return AgentRecord(
        agent_id=f"a{slot}",
        instance="i",
        node="host-a",
        membership=Membership.ACTIVE,
        slot=slot,
        last_slot=slot,
        granted_epoch=1,
        registered_s=START_S,
        last_beat_s=told_s,
        progress=progress(0, step=step, step_time_s=0.01),
        progress_told_s=told_s,
        **fields,
    )


def follow(paces: Paces, t_s: float, *steps: int, paused: bool = False) -> None:
    now_s = START_S + t_s
    paces.follow([island(slot, step=step, told_s=now_s) for slot, step in enumerate(steps)], paused=paused, now_s=now_s)


def test_the_slowest_island_counts_once_it_was_watched_for_long_enough() -> None:
    paces = Paces()
    for t_s in range(int(LEAST_S) + 1):
        assert paces.slowest_s is None
        follow(paces, t_s, 10 * t_s, t_s // 2)
    assert paces.slowest_s == LEAST_S / 15


def test_only_the_recent_past_counts() -> None:
    paces = Paces()
    for t_s in range(0, 1000, 5):
        follow(paces, t_s, t_s)
    for t_s in range(1000, 1005 + int(WINDOW_S), 5):
        follow(paces, t_s, 1000 + (t_s - 1000) // 5)
    assert paces.slowest_s == 5.0


def test_a_pause_and_steps_that_go_back_begin_anew() -> None:
    paces = Paces()
    for t_s in range(0, 60, 5):
        follow(paces, t_s, t_s)
    assert paces.slowest_s == 1.0
    follow(paces, 60, 3)
    assert paces.slowest_s is None
    for t_s in range(65, 125, 5):
        follow(paces, t_s, t_s)
    follow(paces, 126, 125, paused=True)
    assert paces.slowest_s is None


def test_an_island_that_takes_no_step_is_slow() -> None:
    paces = Paces()
    for t_s in range(0, 65, 5):
        follow(paces, t_s, 7)
    assert paces.slowest_s == 60.0
