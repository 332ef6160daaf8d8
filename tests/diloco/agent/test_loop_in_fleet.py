"""Training loops of one's own under a real controller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import nn

from diloco import Island
from diloco.schema import SyncOutcome, SyncReport
from service.errors import ConfigError, ConflictError, UnavailableError
from tests.diloco.conftest import wait_until
from tests.diloco.loops import Loop

pytestmark = pytest.mark.integration

Run = Callable[..., Any]
Serve = Callable[..., str]


class Background:
    """A loop on a thread, which trains until it is told to stop."""

    def __init__(self, controller: str, name: str, **options: Any) -> None:
        arguments = {"controller": controller, "name": name, "synchronizer": None, "slot": None, "sync_every": None}
        self.loop = Loop(0, "", {**arguments, **options})
        self.island = self.loop.island
        self.reports: list[SyncReport] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                seen = self.island.last_sync
                self.loop.train(self.island.num_steps + 1)
                if self.island.last_sync is not seen and self.island.last_sync is not None:
                    self.reports.append(self.island.last_sync)
                self._stop.wait(0.002)
        except BaseException as exc:  # noqa: BLE001 (for the test to look at)
            self.error = exc

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self.island.close()


@contextmanager
def running(controller: str, *names: str, **options: Any) -> Iterator[list[Background]]:
    members = [Background(controller, name, **options) for name in names]
    try:
        yield members
    finally:
        for member in members:
            member.end()


def controller_options(tmp_path: Path, synchronizer: str, *options: str) -> tuple[str, ...]:
    return (
        *("--port", "0", "--journal", str(tmp_path / "journal.sqlite"), "--synchronizer-url", synchronizer),
        *("--num-slots", "2", "--policy", "fixed_h", "--min-h", "8", "--max-h", "200", "--tick-s", "0.1"),
        *("--lease-timeout-s", "2", "--policy-params", '{"h": 60}', *options),
    )


@pytest.mark.parametrize("mode", ["synchronous", "per_island"])
def test_loops_sync_when_the_controller_says_and_tell_it_how_far_they_are(
    serve: Serve, run_service: Run, tmp_path: Path, mode: str
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    controller = run_service("controller", *controller_options(tmp_path, url, "--mode", mode))
    with running(controller.url, "a", "b") as members:
        assert sorted(member.island.slot for member in members) == [0, 1]
        controller.until(lambda: [r for r in controller.get("/v1/rounds").json()["rounds"] if r["closed"]][1:])
        for member in members:
            wait_until(lambda member=member: member.island.version >= 2)  # type: ignore[misc]
            assert {report.outcome for report in member.reports} == {SyncOutcome.APPLIED}
            assert (member.reports[0].blocked_s is not None) == (mode == "per_island")
        islands = controller.get("/v1/islands").json()
        assert all(island["alive"] and island["progress"]["step"] > 0 for island in islands)
    controller.until(lambda: all(not island["alive"] for island in controller.get("/v1/islands").json()))


def test_a_loop_and_an_agent_share_a_run_whose_fragments_sync_in_turn(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    options = controller_options(tmp_path, url, "--mode", "per_island", "--num-fragments", "3")
    controller = run_service("controller", *options)
    agent = run_island("--controller", controller.url, "--agent-id", "agent")
    with running(controller.url, "loop") as (member,):
        assert member.island.num_fragments == 3
        # Two turns of all fragments, each taken by both.
        wait_until(lambda: member.island.version >= 6)
        agent.until_progress(lambda p: p.round >= 6)
        done = controller.until(lambda: [r for r in controller.get("/v1/rounds").json()["rounds"] if r["closed"]][5:])
        assert all(sorted(each["slots_applied"]) == [0, 1] and not each["slots_failed"] for each in done)
        fragments = [report.round % 3 for report in member.reports[:6]]
        assert fragments == [0, 1, 2, 0, 1, 2]
        assert {report.outcome for report in member.reports} == {SyncOutcome.APPLIED}
        assert member.error is None
    assert agent.terminate() == 0


def test_loops_wait_while_the_run_is_paused_and_go_on_alone_without_the_controller(
    serve: Serve, run_service: Run, tmp_path: Path
) -> None:
    controller = run_service("controller", *controller_options(tmp_path, serve(tmp_path / "sync", quorum=1)))
    url = controller.url
    with running(url, "a") as (member,):
        httpx.post(f"{url}/v1/control", json={"action": "pause"}, timeout=10, trust_env=False).raise_for_status()

        def stands_still() -> bool:
            before = member.island.num_steps
            threading.Event().wait(0.5)
            return member.island.num_steps == before

        wait_until(stands_still)
        httpx.post(f"{url}/v1/control", json={"action": "resume"}, timeout=10, trust_env=False).raise_for_status()
        wait_until(lambda: not stands_still())
        controller.kill()
        wait_until(lambda: any(report.autonomous for report in member.reports))
        assert member.error is None


def test_a_loop_whose_slot_is_taken_back_ends_with_the_reason(serve: Serve, run_service: Run, tmp_path: Path) -> None:
    controller = run_service("controller", *controller_options(tmp_path, serve(tmp_path / "sync", quorum=1)))
    url = controller.url
    with running(url, "a") as (member,):
        order = {"action": "drain", "slot": member.island.slot, "when": "now"}
        httpx.post(f"{url}/v1/control", json=order, timeout=10, trust_env=False).raise_for_status()
        wait_until(lambda: member.error is not None)
        assert isinstance(member.error, ConflictError)
        assert "slot: the controller has taken slot 0 back" in str(member.error)


def test_a_controller_that_is_away_is_told_with_the_remedy() -> None:
    with pytest.raises(UnavailableError, match=r"controller: http://127.0.0.1:9 gave no slot in time: not registered"):
        Island(nn.Linear(2, 2), controller="http://127.0.0.1:9", timeout_s=0.5)
    with pytest.raises(ConfigError, match="controller: the controller says when to sync and how"):
        Island(nn.Linear(2, 2), controller="http://127.0.0.1:9", sync_every=5)
