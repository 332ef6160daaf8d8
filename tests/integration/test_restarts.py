"""Controller, synchronizer, sidecar and rank worker are killed in mid-run; training and decisions go on."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from controller.schema import BudgetSpec, Fleet, PolicySpec
from diloco.schema import AgentStatus, OuterState, Progress
from replay.fleet import FleetSpec, Server, TrainingFleet
from replay.processes import Child, Children, free_ports
from tests.integration.helpers import descendants_of, eventually, is_alive

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(240)]

PORTS = range(18600, 18700)
TRAIN_OPTIONS = (("batch_size", "2"), ("context", "64"), ("width", "64"), ("num_layers", "2"), ("num_heads", "2"))


@dataclass
class Run:
    """A running fleet whose services can be killed and started again on the same state."""

    fleet: TrainingFleet
    children: Children

    def child(self, name: str) -> Child:
        return next(child for child in self.children.running if child.name == name)

    def kill(self, name: str) -> None:
        child = self.child(name)
        child.process.kill()
        child.process.wait()
        self.children.running.remove(child)

    def restart(self, name: str) -> None:
        self.kill(name)
        self.fleet.start_again(name)

    def worker(self, index: int) -> int:
        """Process id of the worker that trains, one of those that the island's agent has: others stand by."""
        answer = httpx.get(f"{self.fleet.island_url(index)}/v1/status", timeout=5, trust_env=False).raise_for_status()
        (worker,) = AgentStatus.model_validate(answer.json()).worker_pids
        return worker

    def seen(self) -> Fleet:
        return self.fleet.fleet()

    def steps(self) -> int:
        return sum(island.progress.step for island in self.seen().islands if island.progress)

    def state(self) -> OuterState:
        return OuterState.model_validate(
            httpx.get(f"{self.fleet.synchronizer_url}/v1/state", timeout=5, trust_env=False).json()
        )

    def version(self) -> int:
        return self.state().fragments[0].version


@pytest.fixture
def run(vllm_url: str, children: Children, tmp_path: Path) -> Run:
    spec = FleetSpec(
        servers=(Server(vllm_url, None),),
        island_cores=(None, None),
        slo="e2e:200ms",
        busy_requests=4,
        scrape_interval_s=0.5,
        min_h=4,
        max_h=24,
        seed=0,
        train_options=TRAIN_OPTIONS,
    )
    fleet = TrainingFleet(spec, children=children, directory=tmp_path, ports=free_ports(spec.num_ports, PORTS))
    asyncio.run(fleet.start())
    fleet.begin(PolicySpec(name="fixed_h", params={"h": 8}), BudgetSpec(outer_syncs=500, horizon_s=3600.0))
    eventually(lambda: fleet.fleet().rounds_closed >= 2, what="two rounds")
    return Run(fleet, children)


def test_controller_comes_back_with_registry_rounds_and_budget(run: Run) -> None:
    before = run.seen()
    spent = budget_spent(run)
    run.kill("controller")
    version = run.version()
    # Islands do not need the controller: past max_h they sync by themselves through the synchronizer.
    eventually(lambda: run.version() > version, deadline_s=60, what="an autonomous round")
    run.fleet.start_again("controller")
    after = eventually(lambda: all_alive(run), what="both islands back")
    assert after.run_id == before.run_id
    assert after.epoch >= before.epoch
    assert slots_of(after) == slots_of(before)
    assert after.rounds_closed >= before.rounds_closed
    assert budget_spent(run) >= spent
    closed = run.seen().rounds_closed
    eventually(lambda: run.seen().rounds_closed > closed, deadline_s=60, what="a directed round after the restart")


def test_synchronizer_comes_back_with_its_version_and_rounds_go_on(run: Run) -> None:
    version, steps = run.version(), run.steps()
    run.restart("synchronizer")
    assert eventually(run.version, what="the state from disk") >= version
    eventually(lambda: run.version() >= version + 2, deadline_s=90, what="two rounds after the restart")
    assert run.steps() > steps


def test_sidecar_comes_back_and_its_load_is_known_again(run: Run) -> None:
    run.kill("sidecar-0")
    eventually(lambda: run.seen().num_unknown == 1, what="unknown load")
    run.fleet.start_again("sidecar-0")
    eventually(lambda: run.seen().num_unknown == 0, what="known load")


def test_a_killed_rank_worker_is_restarted_and_goes_on(run: Run) -> None:
    worker = run.worker(1)
    step = progress_of(run, slot=1).step
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: progress_of(run, slot=1).restarts == 1, what="a counted restart")
    eventually(lambda: progress_of(run, slot=1).step > step + 10, deadline_s=60, what="more steps")
    version = run.version()
    eventually(lambda: run.version() >= version + 2, deadline_s=60, what="rounds with both islands")


def test_a_killed_agent_takes_its_worker_along_and_gets_its_slot_back(run: Run) -> None:
    below = descendants_of(run.child("island-1").process.pid)
    assert run.worker(1) in below
    slots = slots_of(run.seen())
    run.kill("island-1")
    eventually(lambda: not any(map(is_alive, below)), what="the end of the orphaned worker, and of its standby")
    run.fleet.start_again("island-1")
    after = eventually(lambda: all_alive(run), deadline_s=60, what="both islands back")
    assert slots_of(after) == slots
    version = run.version()
    eventually(lambda: run.version() >= version + 2, deadline_s=60, what="rounds with both islands")


def budget_spent(run: Run) -> int:
    answer = httpx.get(f"{run.fleet.controller_url}/v1/budget", timeout=5, trust_env=False).json()
    return int(answer["spent"])


def all_alive(run: Run) -> Fleet | None:
    fleet = run.seen()
    alive = [island for island in fleet.islands if island.alive and island.progress]
    return fleet if len(alive) == 2 else None


def slots_of(fleet: Fleet) -> dict[str, int | None]:
    return {island.agent_id: island.slot for island in fleet.islands}


def progress_of(run: Run, *, slot: int) -> Progress:
    progress = next(island.progress for island in run.seen().islands if island.slot == slot)
    assert progress is not None
    return progress
