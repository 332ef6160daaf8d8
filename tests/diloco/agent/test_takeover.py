"""Whole islands that die, and slots that are handed over: a spare goes on from the state that was replicated."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.schema import RecoveryKind, RecoveryRecord
from diloco.recovery_schema import ReplicaList
from diloco.schema import Rung
from tests.diloco.agent.conftest import IslandService, Service

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

Run = Callable[..., Any]


class FleetUnderTest:
    """A controller and a synchronizer, and islands on nodes of their own."""

    def __init__(self, run_service: Run, run_island: Run, synchronizer: str, tmp_path: Path, *options: str) -> None:
        self._run_island = run_island
        self.controller: Service = run_service(
            "controller",
            *("--port", "0", "--journal", str(tmp_path / "journal.sqlite"), "--synchronizer-url", synchronizer),
            *("--policy", "no_sync", "--tick-s", "0.1", "--lease-timeout-s", "20", "--num-slots", "1"),
            *options,
        )

    def start(self, name: str, *options: str) -> IslandService:
        found: IslandService = self._run_island(
            *("--controller", self.controller.url, "--agent-id", name, "--node", f"on-{name}", *options)
        )
        return found

    def until_parked(self, spare: IslandService) -> None:
        spare.until_logged("worker parked")

    def until_replicated(self, keeper: IslandService, *, beyond: int, slot: int = 0) -> int:
        """The step of the newest replica, once it is beyond that one."""

        def newest() -> int | None:
            told = ReplicaList.model_validate_json(keeper.get("/v1/replicas").content)
            step = max((each.step for each in told.replicas if each.slot == slot), default=-1)
            return step if step > beyond else None

        return keeper.until(newest)

    def recoveries(self, kind: RecoveryKind) -> list[RecoveryRecord]:
        page = self.controller.get("/v1/recoveries?since=0").json()["recoveries"]
        return [each for each in map(RecoveryRecord.model_validate, page) if each.kind is kind]

    def trains_again(self) -> RecoveryRecord:
        return self.controller.until(lambda: self.recoveries(RecoveryKind.TRAINS_AGAIN))[-1]

    def order(self, action: str, **fields: Any) -> None:
        body = {"action": action, **fields}
        reply = httpx.post(f"{self.controller.url}/v1/control", json=body, timeout=10, trust_env=False)
        assert reply.status_code == 200, reply.text


def kill_island(island: IslandService) -> None:
    """The agent and its workers, as a host that dies takes them."""
    pids = island.status().worker_pids
    island.process.send_signal(signal.SIGKILL)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    island.finish()


@pytest.fixture
def fleet(serve: Callable[..., str], run_service: Run, run_island: Run, tmp_path: Path) -> FleetUnderTest:
    return FleetUnderTest(run_service, run_island, serve(tmp_path / "sync", quorum=1), tmp_path)


def test_a_spare_goes_on_from_the_replica_of_an_island_that_died_whole(fleet: FleetUnderTest) -> None:
    island = fleet.start("first")
    island.until_progress(lambda p: p.step > 3)
    spare = fleet.start("spare")
    fleet.until_parked(spare)
    replicated = fleet.until_replicated(spare, beyond=10)
    kill_island(island)
    # The lease is of 20 s: nobody waits for it.
    again = fleet.trains_again()
    assert [record.agent_id for record in fleet.recoveries(RecoveryKind.AGENT_GONE)] == ["first"], (
        fleet.controller.log()
    )
    assert again.rung is Rung.REPLICA, again.detail
    assert again.step is not None
    assert again.step >= replicated
    assert again.agent_id == "spare"
    assert again.from_agent == "first"
    assert again.lost_s is not None
    assert again.detected_s is not None
    assert again.taken_s is not None
    assert again.loaded_s is not None
    assert again.first_step_s is not None
    assert again.lost_s <= again.detected_s <= again.taken_s <= again.loaded_s <= again.first_step_s
    spare.until_progress(lambda p: p.step > replicated + 20)
    assert "restored" in spare.log() or "recovered" in spare.log()


def test_an_island_without_a_replica_goes_on_from_global_parameters_and_says_why(fleet: FleetUnderTest) -> None:
    island = fleet.start("first", "--no-vault")
    island.until_progress(lambda p: p.step > 10)
    spare = fleet.start("spare")
    fleet.until_parked(spare)
    kill_island(island)
    again = fleet.trains_again()
    assert again.rung is Rung.GLOBAL
    assert "no replica of the slot is known" in again.detail
    assert again.steps_lost is not None
    assert again.steps_lost > 0


def test_a_planned_swap_loses_no_step(fleet: FleetUnderTest) -> None:
    island = fleet.start("first")
    island.until_progress(lambda p: p.step > 3)
    spare = fleet.start("spare")
    fleet.until_parked(spare)
    fleet.until_replicated(spare, beyond=3)
    fleet.order("swap", slot=0, when="now")
    again = fleet.trains_again()
    assert (again.rung, again.steps_lost) == (Rung.REPLICA, 0), again.detail
    handed = island.until_logged("state handed over")
    assert f" step={again.step} " in handed
    island.until_status(lambda s: s.slot is None)
    # And back again, to the one that had it first.
    fleet.until_parked(island)
    step = spare.until_progress(lambda p: p.step > (again.step or 0) + 5).step
    fleet.until_replicated(island, beyond=step)
    fleet.order("drain", agent_id="spare", when="now")
    fleet.controller.until(lambda: len(fleet.recoveries(RecoveryKind.TRAINS_AGAIN)) == 2)
    back = fleet.trains_again()
    assert (back.rung, back.steps_lost, back.agent_id) == (Rung.REPLICA, 0, "first")
