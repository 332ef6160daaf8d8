"""Real agents, two slots and three of them: a swap, a drain, a resume; the slots train on where they were."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.schema import IslandStatus, RecoveryRecord, RoundRecord
from diloco.schema import Phase
from replay.processes import Children, answers, free_ports
from tests.integration.helpers import DEADLINE_S, WADILOCO, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PORTS = range(18800, 18900)
TRAIN_OPTIONS = ("--batch-size", "2", "--context", "64", "--width", "64", "--num-layers", "2", "--num-heads", "2")


@dataclass
class Run:
    """A controller, a synchronizer and three agents for two slots."""

    url: str
    logs: Path

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=5, trust_env=False).raise_for_status().json()

    def islands(self) -> dict[str, IslandStatus]:
        return {raw["agent_id"]: IslandStatus.model_validate(raw) for raw in self.get("/v1/islands")}

    def rounds(self) -> list[RoundRecord]:
        return [RoundRecord.model_validate(raw) for raw in self.get("/v1/rounds")["rounds"]]

    def recoveries(self) -> list[RecoveryRecord]:
        return [RecoveryRecord.model_validate(raw) for raw in self.get("/v1/recoveries?since=0")["recoveries"]]

    def control(self, *arguments: str) -> dict[str, Any]:
        command = [*WADILOCO, "control", *arguments, "--controller", self.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def trains(self, agent_id: str, *, beyond: int = 0) -> IslandStatus | None:
        island = self.islands()[agent_id]
        progress = island.progress
        running = island.alive and island.slot is not None and progress is not None and progress.phase is Phase.INNER
        return island if running and progress is not None and progress.step > beyond else None

    def started_at(self, agent_id: str, slot: int) -> int:
        """The step at which the agent's newest worker for the slot began."""
        found = re.findall(
            rf"worker started pid=\d+ rank=0 slot={slot} step=(\d+)", (self.logs / f"{agent_id}.log").read_text()
        )
        return int(found[-1])


@pytest.fixture
def run(children: Children, tmp_path: Path) -> Iterator[Run]:
    ports = iter(free_ports(5, PORTS))
    controller, synchronizer = next(ports), next(ports)

    def start(name: str, *arguments: str) -> None:
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        children.start(name, [*WADILOCO, *arguments], log=tmp_path / f"{name}.log", env=environment)

    synchronizer_url, url = f"http://127.0.0.1:{synchronizer}", f"http://127.0.0.1:{controller}"
    start(
        "synchronizer",
        *("synchronizer", "--port", str(synchronizer), "--directory", str(tmp_path / "outer"), "--quorum", "2"),
    )
    start(
        "controller",
        *("controller", "--port", str(controller), "--journal", str(tmp_path / "journal.sqlite"), "--num-slots", "2"),
        *("--policy", "fixed_h", "--policy-params", "h=8", "--min-h", "2", "--max-h", "100000", "--tick-s", "0.1"),
        *("--synchronizer-url", synchronizer_url, "--lease-timeout-s", "5"),
    )
    for each in (synchronizer_url, url):
        eventually(lambda each=each: answers(f"{each}/healthz"), what=each)  # type: ignore[misc]
    run = Run(url, tmp_path)
    for index in range(3):
        options = ("--agent-id", f"agent-{index}", "--node", f"node-{index}", "--controller", url)
        start(f"agent-{index}", "island", "--port", str(next(ports)), *options, *TRAIN_OPTIONS)
        eventually(lambda index=index: f"agent-{index}" in run.islands(), what=f"agent {index}")  # type: ignore[misc]
    for name in ("agent-0", "agent-1"):
        eventually(lambda name=name: run.trains(name, beyond=4), what=f"{name} trains")  # type: ignore[misc]
    yield run
    children.check()


def rounds_applied(run: Run) -> int:
    return max((each.round for each in run.rounds() if set(each.slots_applied) == {0, 1}), default=-1)


def test_slots_change_hands_and_training_goes_on_where_it_was(run: Run) -> None:
    islands = run.islands()
    slot = islands["agent-0"].slot
    assert slot is not None
    assert islands["agent-2"].slot is None

    # A dry run changes nothing.
    plan = run.control("swap", "--slot", str(slot), "--dry-run")
    assert plan["steps"][0] | {"when": "after_sync"} == {
        "agent_id": "agent-0",
        "slot": slot,
        "change": "swap",
        "when": "after_sync",
        "to_agent": "agent-2",
    }
    assert run.islands()["agent-0"].slot == slot

    # Swap after the next sync: the spare goes on from the step that was reported, and rounds have both slots again.
    run.control("swap", "--slot", str(slot))
    eventually(lambda: run.islands()["agent-2"].slot == slot, what="the spare has the slot")
    eventually(lambda: run.trains("agent-2"), what="the spare trains")
    begun = run.started_at("agent-2", slot)
    assert begun >= 8
    eventually(lambda: run.trains("agent-2", beyond=begun), what="new steps")
    rounds = rounds_applied(run)
    eventually(lambda: rounds_applied(run) > rounds, what="a round of both slots")
    assert run.islands()["agent-0"].slot is None
    assert run.islands()["agent-0"].alive
    log = run.logs / "agent-0.log"
    eventually(lambda: "why=reassigned" in log.read_text(), what="its worker is gone")

    # Drain at once: the slot goes to the agent that waits, which had it before and goes on from where it is now.
    run.control("drain", "--agent-id", "agent-2", "--when", "now")
    eventually(lambda: run.islands()["agent-0"].slot == slot, what="the slot is taken again")
    eventually(lambda: run.trains("agent-0", beyond=begun), what="agent-0 trains again")
    assert run.started_at("agent-0", slot) > begun
    drained = run.islands()["agent-2"]
    assert (drained.slot, drained.drained) == (None, True)

    # Drain with nobody waiting: the other slot goes on alone; resumed, the agent comes back.
    run.control("drain", "--agent-id", "agent-1", "--when", "now")
    eventually(lambda: run.islands()["agent-1"].slot is None, what="an empty slot")
    applied = len(run.rounds())
    eventually(lambda: len(run.rounds()) > applied + 1, what="rounds of one island")
    run.control("resume", "--agent-id", "agent-2")
    eventually(lambda: run.trains("agent-2", beyond=8), what="the resumed agent trains")
    assert run.islands()["agent-2"].slot == 1 - slot

    def ended() -> bool:
        return sum(record.kind == "trains_again" for record in run.recoveries()) == 3

    eventually(ended, what="three ended recoveries", seen=run.recoveries)
    kinds = [record.kind for record in run.recoveries()]
    assert kinds == [
        *("swapped", "spare_took_slot", "trains_again"),
        *("drained", "spare_took_slot", "trains_again"),
        *("drained", "spare_took_slot", "trains_again"),
    ]
    for record in run.recoveries():
        if record.kind == "trains_again":
            assert record.lost_s is not None
            assert record.taken_s is not None
            assert record.first_step_s is not None
            assert record.lost_s <= record.taken_s <= record.first_step_s
