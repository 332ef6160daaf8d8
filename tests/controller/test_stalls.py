"""A controller that stood still holds that against nobody."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

from controller.clock import steady_clock
from controller.core import Controller
from controller.journal import Journal
from controller.loop import Loop
from controller.metrics import Metrics
from controller.registry import LeaseTerms, Registry
from controller.stalls import Stalls
from controller.state import FleetState
from tests.controller.helpers import (
    START_S,
    Client,
    ManualClock,
    MemoryStore,
    make_settings,
    play,
    progress,
    registration,
    until,
)
from tests.controller.processes import Process, controller, eventually


def test_only_what_is_long_counts_as_standing_still() -> None:
    clock = ManualClock(0.0)
    stalls = Stalls(monotonic=clock)
    found = []
    for passed_s in (1.0, 2.5, 3.5, 60.0, 0.5):
        clock.advance(passed_s)
        found.append(stalls.note(due_s=0.5, least_s=3.0))
    assert found == [0.0, 0.0, 3.0, 59.5, 0.0]


def make_registry() -> Registry:
    terms = LeaseTerms(num_slots=2, lease_timeout_s=10.0, takeover_after_s=3.0)
    return Registry(MemoryStore(), terms, epoch=0, agents=[])


def test_one_who_is_gone_keeps_no_lease_of_a_controller_that_stands_still_again_and_again() -> None:
    registry, clock = make_registry(), ManualClock()
    stalls = Stalls(monotonic=clock)
    registry.register(registration("gone"), now_s=clock())
    for _ in range(12):
        clock.advance(5.0)
        registry.excuse(stalls.note(due_s=1.0, least_s=3.0), now_s=clock())
        if lost := registry.expire(clock()):
            break
    assert [agent.agent_id for agent in lost] == ["gone"]


def test_ticks_that_are_rare_beside_a_lease_are_no_stalls(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, lease_timeout_s=1.0, tick_s=0.5)

    async def body(client: Client) -> None:
        await client.register()

        async def is_lost() -> bool:
            return not (await client.get("/v1/islands"))[0]["alive"]

        await until(is_lost, "the end of a lease that nobody renews")

    play(settings, steady_clock(), body)


def test_a_standby_does_not_stand_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, journal = ManualClock(), Journal(tmp_path / "journal.sqlite")
    controller = Controller(None, Metrics(), clock)
    loop = Loop(controller)
    loop._stalls = Stalls(monotonic=clock)

    async def main() -> None:
        for _ in range(60):
            clock.advance(1.0)
            await loop.note_running()
        controller.enter(controller.prepare(FleetState(make_settings(tmp_path), journal, now_s=clock())))
        await loop.note_running()

    asyncio.run(main())
    journal.close()
    assert "stood still" not in caplog.text


def test_time_in_which_the_controller_stood_still_is_held_against_no_lease() -> None:
    registry = make_registry()
    registry.register(registration("a"), now_s=START_S)
    registry.register(registration("b"), now_s=START_S - 8)
    registry.excuse(60.0, now_s=START_S + 61)
    assert registry.expire(START_S + 61) == []
    assert [agent.agent_id for agent in registry.expire(START_S + 63)] == ["b"]
    assert [agent.agent_id for agent in registry.expire(START_S + 71)] == ["a"]


def test_the_slot_that_is_kept_for_a_lost_agent_is_kept_longer_too() -> None:
    registry = make_registry()
    registry.register(registration("a"), now_s=START_S)
    (lost,) = registry.expire(START_S + 11)
    registry.excuse(60.0, now_s=START_S + 72)
    registry.register(registration("spare", slot=1), now_s=START_S + 72)
    assert registry.register(registration("b"), now_s=START_S + 72).slot is None
    assert registry.register(registration("a", "again"), now_s=START_S + 73).slot == lost.slot


def test_nobody_is_heard_of_later_than_now() -> None:
    registry = make_registry()
    registry.register(registration("a"), now_s=START_S + 60)  # the first thing after it woke
    registry.excuse(60.0, now_s=START_S + 60)
    assert registry.records["a"].last_beat_s == START_S + 60


def test_islands_keep_their_slots_over_a_stop_of_the_controller(tmp_path: Path) -> None:
    with controller(tmp_path, "--lease-timeout-s", "2", "--sync-timeout-s", "60") as process:
        lease = process.register()
        process.beat(progress=progress(1))
        ticks = _num_ticks(process)
        process.child.send_signal(signal.SIGSTOP)
        time.sleep(3)  # the very thing that is tried
        process.child.send_signal(signal.SIGCONT)
        stop = threading.Event()
        beating = threading.Thread(target=_beat, args=(process, stop))
        beating.start()
        try:
            eventually(lambda: _num_ticks(process) > ticks + 10, "ticks after the stop")
            (island,) = process.http.get("/v1/islands").json()
            assert (island["alive"], island["slot"], island["epoch"]) == (True, lease["slot"], lease["epoch"])
            kinds = [one["kind"] for one in process.http.get("/v1/recoveries").json()["recoveries"]]
            assert "lease_lost" not in kinds
        finally:
            stop.set()
            beating.join()


def _beat(process: Process, stop: threading.Event) -> None:
    step = 1001
    while not stop.wait(0.1):
        process.beat(progress=progress(1, step=step))
        step += 1


def _num_ticks(process: Process) -> float:
    text = process.http.get("/metrics").text
    ticks = next(line for line in text.splitlines() if line.startswith("wadiloco_controller_tick_seconds_count"))
    return float(ticks.rpartition(" ")[2])
