"""An island on the gate of a real server: it yields to requests, and to silence; whoever dies, it goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from diloco.schema import Progress
from replay.fleet import FleetSpec, Server, TrainingFleet
from replay.processes import Children, free_ports
from sidecar.schema import EngineState, Load, LoadSample
from sidecar.vllm_plugin.gate_reader import GateReason
from tests.integration.helpers import eventually
from tests.integration.servers import LiveServer, LiveSidecar, stopped

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(600)]

PORTS = range(18800, 18900)
PATIENCE_S = 3.0
TRICKLE_S = 1.0
YIELDED_S = 2.0
TRAIN_OPTIONS = (
    *(("batch_size", "2"), ("context", "64"), ("width", "64"), ("num_layers", "2"), ("num_heads", "2")),
    *(("gate_patience_s", str(PATIENCE_S)), ("gate_trickle_s", str(TRICKLE_S))),
)


@dataclass
class Site:
    """A gated server with an island beside it, which never syncs."""

    server: LiveServer
    fleet: TrainingFleet
    children: Children
    logs: Path

    def progress(self) -> Progress:
        (island,) = self.fleet.fleet().islands
        assert island.progress is not None
        return island.progress

    def trains(self) -> Progress:
        """The island runs freely: many steps in no time, as seen from a trickle."""
        begin = self.progress()

        def runs() -> Progress | None:
            now = self.progress()
            return now if now.step >= begin.step + 20 and now.yield_reason is None else None

        return eventually(runs, what="inner steps")

    def waits(self, reason: GateReason) -> Progress:
        """The island says that it waits, and why."""

        def waiting() -> Progress | None:
            now = self.progress()
            return now if now.yield_reason == reason else None

        return eventually(waiting, what=f"an island that waits: {reason}")

    def has_yielded(self, total_s: float) -> Progress:
        def grown() -> Progress | None:
            now = self.progress()
            return now if now.yielded_s is not None and now.yielded_s >= total_s else None

        return eventually(grown, what=f"{total_s:.1f} s yielded")

    def trickles(self, reason: GateReason) -> None:
        """The island has lost patience: steps go on, not faster than one per `TRICKLE_S`."""
        begin, began_s = self.waits(reason), time.monotonic()
        now = eventually(lambda: now if (now := self.progress()).step >= begin.step + 4 else None, what="a trickle")
        elapsed_s = time.monotonic() - began_s
        # Its report may be as old as a heartbeat is long, and the first step may have been due.
        assert now.step - begin.step <= elapsed_s / TRICKLE_S + 3
        assert self.waits(reason).yielded_s

    def kill(self, name: str) -> None:
        child = next(child for child in self.children.running if child.name == name)
        child.process.kill()
        child.process.wait()
        self.children.running.remove(child)


@pytest.fixture
def site(server: LiveServer, children: Children, tmp_path: Path) -> Site:
    spec = FleetSpec(
        servers=(Server(server.url, None, server.gate),),
        island_cores=(None,),
        slo="e2e:200ms",
        busy_requests=4,
        scrape_interval_s=0.5,
        min_h=100_000,
        max_h=1_000_000,
        seed=0,
        train_options=TRAIN_OPTIONS,
    )
    fleet = TrainingFleet(spec, children=children, directory=tmp_path, ports=free_ports(spec.num_ports, PORTS))
    asyncio.run(fleet.start())
    return Site(server, fleet, children, tmp_path)


def test_an_island_stands_still_while_a_stream_runs_and_while_nobody_tells_the_load(site: Site) -> None:
    site.trains()
    (engine,) = site.server.processes("VLLM::EngineCore")
    with site.server.unfinished(stream=True):
        began = site.waits(GateReason.IN_FLIGHT)
        assert began.yielded_s is not None
        with stopped(engine):  # the stream lasts as long as it is looked at
            now = site.has_yielded(began.yielded_s + YIELDED_S)
        assert now.step == began.step
    site.trains()

    site.kill("sidecar-0")
    site.trickles(GateReason.SIDECAR_DEAD)
    site.fleet.start_again("sidecar-0")
    site.trains()


def test_a_server_killed_under_load_is_down_then_ready_and_leaves_nothing_behind(site: Site) -> None:
    server = site.server
    sidecar = LiveSidecar(site.children, server.url, site.logs, gate=server.gate)
    with requests_go_on(server) as answered_s:
        eventually(lambda: sidecar.forecast().num_observations >= 10, what="observations")
        before = sidecar.forecast()
        killed_s = time.time()
        server.kill()
        sidecar.becomes(EngineState.DOWN)
        assert server.becomes(GateReason.NO_WRITER).in_flight is None
        site.trickles(GateReason.NO_WRITER)
        assert sidecar.forecast().num_observations >= before.num_observations
        assert sidecar.forecast().points == ()
        server.start()
        sidecar.becomes(EngineState.READY)
        eventually(lambda: sidecar.forecast().num_observations >= before.num_observations + 10, what="observations")
    load = sidecar.load(window_s=3600)
    assert load.source == "plugin"
    assert sidecar.metric("wadiloco_sidecar_engine_restarts_total") == 1
    new = samples_since_down(load)
    assert (new[0].interval_s, new[0].finished, new[0].arrivals) == (None, None, None)
    # Nothing of the old server's totals is in the differences.
    assert 0 < sum(sample.finished or 0 for sample in new) <= sum(at_s > killed_s for at_s in answered_s)
    assert server.rests().in_flight == 0
    assert [slot.pid for slot in server.slots() if slot.in_flight] == []
    assert [path.name for path in server.gate.glob("*.ring")] == [f"steps-0-{server.pid}.ring"]
    site.trains()


def samples_since_down(load: Load) -> list[LoadSample]:
    down_s = max(sample.t_s for sample in load.window if sample.state is EngineState.DOWN)
    return [sample for sample in load.window if sample.t_s > down_s and sample.state is EngineState.READY]


@contextmanager
def requests_go_on(server: LiveServer) -> Iterator[list[float]]:
    """One request after another, whether the server answers or not; yields the Unix times of the answers."""
    is_over = threading.Event()
    answered_s: list[float] = []

    def ask() -> None:
        while not is_over.is_set():
            try:
                server.ask(max_tokens=64).raise_for_status()
                answered_s.append(time.time())
            except httpx.HTTPError:
                is_over.wait(0.1)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield answered_s
    finally:
        is_over.set()
        client.join()
