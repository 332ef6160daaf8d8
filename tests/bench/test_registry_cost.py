"""What a heartbeat, a spare's registration and a tick cost the controller, with a hundred and with 5,000 agents."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.app import build_controller_app
from controller.core import Controller
from controller.loop import Loop
from controller.schema import Heartbeat
from tests.controller.helpers import ManualClock, make_settings, progress, registration, report

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

SMALL, LARGE = 100, 5000
BEATS = 4000
SPARES_FRAC = 0.2
PARTS = 3
"""Measured in turns, so that a busy moment of the machine hits both."""


class Fleet:
    """A controller without HTTP, four fifths of whose agents hold a slot."""

    def __init__(self, folder: Path, num_agents: int) -> None:
        self.clock = ManualClock()
        self.num_islands = round(num_agents * (1 - SPARES_FRAC))
        settings = make_settings(folder, num_slots=self.num_islands, max_h=10**6, policy="no_sync", min_h=1)
        app = build_controller_app(settings, clock=self.clock)
        self.controller: Controller = app.state.controller
        self.loop: Loop = app.state.loop
        registry = self.controller.state.registry
        for index in range(num_agents):
            registry.register(registration(f"a{index}", node=f"n{index}"), now_s=self.clock())
        self.epoch = registry.epoch
        self.step = 0

    def beat(self, index: int, *, synced: bool = False) -> None:
        beat = Heartbeat(
            instance="first",
            epoch=self.epoch,
            t_s=self.clock(),
            progress=progress(0 if synced else 5, step=1000 + self.step // self.num_islands, round=0),
            syncs=[report(0, started_s=float(self.step + 1))] if synced else [],
        )
        self.controller._accept_beat(f"a{index % self.num_islands}", beat)
        self.step += 1

    def register_spare(self, index: int) -> None:
        spares = round(self.num_islands / (1 - SPARES_FRAC)) - self.num_islands
        name = f"a{self.num_islands + index % spares}"
        self.controller.state.registry.register(registration(name, node="n"), now_s=self.clock())


def per_call_us(work: Callable[[int], None], *, calls: int) -> float:
    started_s = time.perf_counter()
    for index in range(calls):
        work(index)
    return (time.perf_counter() - started_s) / calls * 1e6


def tick_ms(fleet: Fleet) -> float:
    async def ticks() -> float:
        spans = []
        for _ in range(10):
            fleet.clock.advance(0.05)  # Less than a lease in all.
            started_s = time.perf_counter()
            await fleet.loop._on_tick(fleet.clock())
            spans.append(time.perf_counter() - started_s)
        return statistics.median(spans) * 1e3

    return asyncio.run(ticks())


def test_a_heartbeat_costs_the_same_in_a_fleet_of_a_hundred_and_of_five_thousand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleets = {}
    for size in (SMALL, LARGE):
        (tmp_path / str(size)).mkdir()
        fleets[size] = Fleet(tmp_path / str(size), size)
    beats: dict[int, list[float]] = {SMALL: [], LARGE: []}
    spares: dict[int, list[float]] = {SMALL: [], LARGE: []}
    ticks: dict[int, list[float]] = {SMALL: [], LARGE: []}
    for _ in range(PARTS):
        for size, fleet in fleets.items():
            beats[size].append(per_call_us(fleet.beat, calls=BEATS))
            spares[size].append(per_call_us(fleet.register_spare, calls=BEATS))
            ticks[size].append(tick_ms(fleet))
    # Every island's report of one round: each is added to what the others said of it.
    reports = {
        size: per_call_us(lambda index, fleet=fleet: fleet.beat(index, synced=True), calls=fleet.num_islands)  # type: ignore[misc]
        for size, fleet in fleets.items()
    }
    with capsys.disabled():
        print()
        for size in fleets:
            print(
                f"{size:5d} agents: heartbeat {min(beats[size]):6.1f} us, a spare's registration "
                f"{min(spares[size]):6.1f} us, a sync report {reports[size]:7.1f} us, tick {min(ticks[size]):6.2f} ms"
            )
    assert min(beats[LARGE]) < 2 * min(beats[SMALL])
    assert min(spares[LARGE]) < 2 * min(spares[SMALL])
    # 5,000 agents beat 5,000 times a second at the usual lease of 10 s: half a core at most.
    assert min(beats[LARGE]) * LARGE * 1e-6 < 0.5
