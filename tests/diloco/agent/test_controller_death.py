"""The controller is killed in the middle of a round, under real islands and a real synchronizer.

A third agent is the test itself: it takes a slot and holds the round open until it contributes, or for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from controller.schema import AgentLease, AgentRegistration, Directive, DirectiveKind, Directives, Heartbeat
from diloco.schema import OuterState, Phase, Progress
from diloco.transport import SynchronizerClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

Run = Callable[..., Any]
Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]

LEASE_S = 5.0
H = 60


def options(folder: Path, synchronizer: str, *more: str, port: int = 0) -> tuple[str, ...]:
    return (
        *("--port", str(port), "--journal", str(folder / "journal.sqlite"), "--synchronizer-url", synchronizer),
        *("--num-slots", "3", "--policy", "fixed_h", "--policy-params", f'{{"h": {H}}}', "--budget-syncs", "500"),
        *("--min-h", "8", "--max-h", "1000000", "--tick-s", "0.1", "--lease-timeout-s", str(LEASE_S)),
        *more,
    )


class ThirdAgent:
    """An agent whose contribution everybody waits for."""

    def __init__(self, controller_url: str) -> None:
        self._http = httpx.Client(base_url=controller_url, timeout=30, trust_env=False)
        self._gone = threading.Event()
        self._trains = threading.Event()
        registration = AgentRegistration(agent_id="third", instance="test", node="elsewhere", slot=2)
        body = registration.model_dump(mode="json")
        self.lease = AgentLease.model_validate(self._http.post("/v1/agents", json=body).raise_for_status().json())
        self._beats = threading.Thread(target=self._beat)
        self._beats.start()

    def train(self) -> None:
        """Say that there is progress: from here on a round may begin."""
        self._trains.set()

    def next_sync(self) -> Directive:
        """The next directive; by then everybody else has been sent theirs."""
        query: dict[str, str | int] = {"instance": "test", "after": self.lease.directive_seq, "wait_s": 30}
        answer = self._http.get("/v1/agents/third/directives", params=query).raise_for_status()
        (directive,) = Directives.model_validate(answer.json()).directives
        assert directive.kind is DirectiveKind.SYNC
        return directive

    def close(self) -> None:
        self._gone.set()
        self._beats.join(10)
        self._http.close()

    def _beat(self) -> None:
        while not self._gone.wait(LEASE_S / 10):
            beat = Heartbeat(instance="test", epoch=self.lease.epoch, t_s=time.time(), progress=self._progress())
            try:
                self._http.post("/v1/agents/third/heartbeat", json=beat.model_dump(mode="json"))
            except httpx.HTTPError:
                return

    def _progress(self) -> Progress | None:
        if not self._trains.is_set():
            return None
        h = 2 * H
        return Progress(step=h, inner_steps_since_sync=h, tokens=h, tokens_since_sync=h, phase=Phase.INNER)


@dataclass
class Held:
    """A run of two islands whose first round is held open."""

    controller: Any
    islands: list[Any]
    third: ThirdAgent
    synchronizer: SynchronizerClient
    start_controller: Callable[[], Any]

    def state(self) -> OuterState:
        return self.synchronizer.state(deadline_s=time.time() + 20)

    def slots(self) -> tuple[int, ...]:
        return self.state().fragments[0].open_round.slots

    def version(self) -> int:
        return self.state().fragments[0].version

    def contribute(self) -> None:
        """What the third island does."""
        flat = torch.empty(self.islands[0].status().num_parameters)
        self.synchronizer.pull(0, flat, deadline_s=time.time() + 20)
        self.synchronizer.push(
            flat, round=0, slot=2, epoch=self.third.lease.epoch, tokens=1, deadline_s=time.time() + 20
        )

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come true: {self.islands[0].log()[-2000:]}"
            threading.Event().wait(0.02)


@pytest.fixture
def hold(
    serve: Serve, connect: Connect, run_service: Run, run_island: Run, tmp_path: Path
) -> Iterator[Callable[..., Held]]:
    agents: list[ThirdAgent] = []

    def begin(*more: str, is_stopped: bool = False, **settings: Any) -> Held:
        url = serve(tmp_path / "sync", **{"quorum": 3, "round_timeout_s": 3600.0, **settings})
        controller = run_service("controller", *options(tmp_path, url, *more))
        port = int(controller.url.rpartition(":")[2])
        agents.append(ThirdAgent(controller.url))
        islands = [
            run_island("--controller", controller.url, "--agent-id", f"island-{slot}", "--slot", str(slot))
            for slot in range(2)
        ]
        for island in islands:
            island.until_progress(lambda p: p.step > H)
            if is_stopped:
                os.kill(island.status().worker_pid, signal.SIGSTOP)
        agents[-1].train()
        return Held(
            controller,
            islands,
            agents[-1],
            connect(url),
            lambda: run_service("controller", *options(tmp_path, url, *more, port=port)),
        )

    yield begin
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("moment", ["after the directive", "after the pushes"])
@pytest.mark.parametrize("mode", ["synchronous", "per_island"])
def test_a_round_completes_without_the_controller_and_is_counted_once_when_it_is_back(
    hold: Callable[..., Held], mode: str, moment: str
) -> None:
    run = hold("--mode", mode, "--sync-timeout-s", "120")
    run.third.next_sync()
    # In per_island mode the others are directed when their own reports say that it is time.
    run.until(lambda: directed(run.controller) >= {0, 1, 2}, "directives to all")
    if moment == "after the pushes":
        run.until(lambda: run.slots() == (0, 1), "both pushes")
    slots = {one["agent_id"]: one["slot"] for one in run.controller.get("/v1/islands").json()}
    run_id = run.controller.get("/v1/fleet").json()["run_id"]
    run.controller.kill()
    run.until(lambda: run.slots() == (0, 1), "both pushes")
    assert run.version() == 0
    if mode == "per_island":
        # The round is open, the controller is dead, and training goes on.
        for island in run.islands:
            before = island.progress()
            after = island.until_progress(lambda p, seen=before: p.step > seen.step + 50)
            assert (after.round, after.phase) == (0, Phase.INNER)
    run.contribute()
    for island in run.islands:
        done = island.until_progress(lambda p: p.round == 1)
        island.until_progress(lambda p, seen=done: p.step > seen.step + 50)
        assert "outcome=applied" in island.log()
        assert island.status().restarts == 0
    assert run.version() == 1
    again = run.start_controller()
    for island in run.islands:
        island.until_status(lambda s: s.controller_reachable and s.unacknowledged_syncs == 0)
    fleet = again.get("/v1/fleet").json()
    assert fleet["run_id"] == run_id
    assert {one["agent_id"]: one["slot"] for one in fleet["islands"]} == slots
    first = again.until(lambda: next((r for r in rounds_of(again) if {0, 1} <= set(r["slots_applied"])), None))
    assert (first["round"], first["reason"]) == (0, "fixed_h_reached")
    # The third agent is silent: the others go on without it, and every outer step costs one sync.
    again.until(lambda: run.version() >= 3)
    again.until(lambda: spent(again) == run.version())
    numbers = [one["round"] for one in rounds_of(again) if one["slots_applied"]]
    assert numbers == sorted(set(numbers))


def test_a_round_closes_before_its_islands_give_up_whatever_the_synchronizer_was_told(
    hold: Callable[..., Held],
) -> None:
    run = hold("--sync-timeout-s", "8")
    directive = run.third.next_sync()
    assert directive.close_by_s is not None
    assert directive.deadline_s is not None
    assert directive.close_by_s < directive.deadline_s
    # Nobody ever contributes for the third: by its own settings the synchronizer would wait for an hour.
    for island in run.islands:
        island.until_progress(lambda p: p.round >= 1)
        island.until_logged("outcome=applied")
        assert "outcome=failed" not in island.log()


def test_a_synchronizer_that_contradicts_the_orders_is_told_of_in_the_log(hold: Callable[..., Held]) -> None:
    run = hold("--sync-timeout-s", "120", quorum=1, round_timeout_s=2.0, grace_max_s=0.0)
    run.third.next_sync()
    for island in run.islands:
        island.until_progress(lambda p: p.round >= 1)
        island.until(lambda log=island.log: "quorum: the round was directed to 3" in log())
        assert "raise its --round-timeout-s" in island.log()


def test_a_late_island_is_taken_in_with_less_weight(hold: Callable[..., Held]) -> None:
    options = ("--mode", "per_island", "--quorum", "1", "--sync-timeout-s", "120")
    run = hold(*options, is_stopped=True, max_staleness=2, grace_max_s=0.0)
    early, late = run.islands
    run.until(lambda: directed(run.controller) >= {0, 1}, "directives to both")
    os.kill(early.status().worker_pid, signal.SIGCONT)
    run.until(lambda: run.version() >= 1, "a round that one island closed")
    os.kill(late.status().worker_pid, signal.SIGCONT)
    late.until_logged("outcome=stale")
    assert "staleness=1" in late.log()
    run.third.close()
    version = late.progress().round
    late.until_progress(lambda p: p.round > version)


def rounds_of(controller: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = controller.get("/v1/rounds").json()["rounds"]
    return found


def directed(controller: Any) -> set[int]:
    """Slots that were told to come to a round."""
    decisions = controller.get("/v1/decisions?limit=10000").json()["decisions"]
    return {slot for one in decisions if one["action"] == "sync" for slot in one["slots"]}


def spent(controller: Any) -> int:
    return int(controller.get("/v1/budget").json()["spent"])
