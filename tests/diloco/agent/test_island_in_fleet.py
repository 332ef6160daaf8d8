"""Two islands, a real controller and a real synchronizer."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco.transport import SynchronizerClient
from tests.ports import share_of

pytestmark = pytest.mark.integration

Run = Callable[..., Any]
Serve = Callable[..., str]


def controller_options(tmp_path: Path, synchronizer: str, *options: str, port: int = 0) -> tuple[str, ...]:
    return (
        *("--port", str(port), "--journal", str(tmp_path / "journal.sqlite"), "--synchronizer-url", synchronizer),
        *("--num-slots", "2", "--policy", "fixed_h", "--min-h", "8", "--max-h", "400", "--tick-s", "0.1"),
        *("--lease-timeout-s", "2", "--policy-params", '{"h": 100}'),
        *options,
    )


def islands_of(run_island: Run, controller_url: str) -> list[Any]:
    return [run_island("--controller", controller_url, "--agent-id", f"island-{index}") for index in range(2)]


def rounds_of(controller: Any) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = controller.get("/v1/rounds").json()["rounds"]
    return rounds


def test_directed_rounds_are_applied_by_all_islands_and_the_loss_falls(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    controller = run_service("controller", *controller_options(tmp_path, serve(tmp_path / "sync", quorum=2)))
    islands = islands_of(run_island, controller.url)
    early = [island.until_progress(lambda p: p.step > 10) for island in islands]
    for island in islands:
        island.until_progress(lambda p: p.round >= 3)
    done = controller.until(lambda: [r for r in rounds_of(controller) if r["closed"]][:3])
    assert [r["round"] for r in done] == list(range(len(done)))
    assert all(sorted(r["slots_applied"]) == [0, 1] and not r["slots_failed"] for r in done)
    assert sorted(island.status().slot for island in islands) == [0, 1]
    for island, first in zip(islands, early, strict=True):
        assert island.progress().loss < first.loss
        assert "outcome=applied" in island.log()
        assert island.terminate() == 0
    controller.until(lambda: all(not island["alive"] for island in controller.get("/v1/islands").json()))


def test_an_island_that_is_there_before_its_controller_begins_the_run_with_its_number_of_fragments(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    synchronizer = serve(tmp_path / "sync", quorum=1)
    port = next(port for port in share_of(range(21300, 21400)) if is_free(port))
    address = ("--controller", f"http://127.0.0.1:{port}", "--slot", "0", "--synchronizer", synchronizer)
    island = run_island(*address, "--agent-id", "early")
    island.until_logged("controller is away")
    options = controller_options(tmp_path, synchronizer, "--num-fragments", "2", "--num-slots", "1", port=port)
    controller = run_service("controller", *options)
    assert island.until_status(lambda status: status.worker_ready).num_fragments == 2
    controller.until(lambda: [r for r in rounds_of(controller) if r["closed"]][2:])
    assert all(not r["slots_failed"] for r in rounds_of(controller) if r["closed"])


def test_an_island_in_a_run_goes_on_at_once_and_names_the_remedy_when_the_controller_wants_other_fragments(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    synchronizer = serve(tmp_path / "sync", quorum=1)
    first = run_island("--slot", "1", "--synchronizer", synchronizer)
    first.until_status(lambda status: status.worker_ready)
    first.terminate()
    port = next(port for port in share_of(range(21300, 21400)) if is_free(port))
    address = ("--controller", f"http://127.0.0.1:{port}", "--slot", "0", "--synchronizer", synchronizer)
    island = run_island(*address, "--agent-id", "early")
    assert island.until_status(lambda status: status.worker_ready).num_fragments == 1
    assert "no controller yet, starting without it slot=0" in island.log()
    options = controller_options(tmp_path, synchronizer, "--num-fragments", "2", "--num-slots", "1", port=port)
    controller = run_service("controller", *options)
    remedy = "start the controller with --num-fragments 1 and another --journal"
    island.until(lambda: "no sync will be taken" in island.log())
    assert remedy in island.log()
    failed = controller.until(lambda: [r for r in rounds_of(controller) if r["slots_failed"]])
    assert failed[0]["slots_failed"] == [0]
    controller.until(lambda: remedy in controller.log())


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_islands_survive_the_controller_and_sync_by_themselves_at_max_h(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    synchronizer = serve(tmp_path / "sync", quorum=2)
    controller = run_service("controller", *controller_options(tmp_path, synchronizer, "--policy-params", '{"h": 400}'))
    url = controller.url
    islands = islands_of(run_island, url)
    for island in islands:
        island.until_progress(lambda p: p.step > 10)
    before = min(island.progress().round for island in islands)
    controller.kill()
    for island in islands:
        island.until_progress(lambda p, seen=before: p.round >= seen + 2)
        assert "autonomous=True" in island.log()
        assert island.status().controller_reachable is False
    port = int(url.rpartition(":")[2])
    again = run_service("controller", *controller_options(tmp_path, synchronizer, port=port))
    for island in islands:
        # Everything that happened meanwhile is told, once.
        island.until_status(lambda s: s.controller_reachable and s.unacknowledged_syncs == 0)
    again.until(lambda: [r for r in rounds_of(again) if r["decision_id"] is None and r["slots_applied"]])


def test_a_worker_that_dies_in_a_round_is_replaced_and_the_run_goes_on(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    controller = run_service("controller", *controller_options(tmp_path, serve(tmp_path / "sync", quorum=2)))
    islands = islands_of(run_island, controller.url)
    for island in islands:
        island.until_progress(lambda p: p.round >= 1)
    os.kill(islands[0].status().worker_pid, signal.SIGKILL)
    islands[0].until_status(lambda s: s.restarts == 1 and s.worker_ready)
    reached = max(island.progress().round for island in islands)
    for island in islands:
        island.until_progress(lambda p, seen=reached: p.round >= seen + 2)


def test_pausing_the_fleet_holds_every_island(serve: Serve, run_service: Run, run_island: Run, tmp_path: Path) -> None:
    controller = run_service("controller", *controller_options(tmp_path, serve(tmp_path / "sync", quorum=2)))
    islands = islands_of(run_island, controller.url)
    for island in islands:
        island.until_progress(lambda p: p.step > 10)
    for action, phase in (("pause", "paused"), ("resume", "inner")):
        reply = httpx.post(f"{controller.url}/v1/control", json={"action": action}, timeout=10, trust_env=False)
        assert reply.status_code == 200
        for island in islands:
            island.until_progress(lambda p, wanted=phase: p.phase == wanted)


def test_an_agent_without_a_free_slot_waits_and_takes_over_when_one_leaves(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    options = controller_options(tmp_path, serve(tmp_path / "sync", quorum=1), "--num-slots", "1")
    controller = run_service("controller", *options)
    first = run_island("--controller", controller.url, "--agent-id", "first")
    first.until_status(lambda s: s.worker_ready)
    spare = run_island("--controller", controller.url, "--agent-id", "spare")
    assert spare.until_status(lambda s: s.epoch is not None).slot is None
    assert "no free slot" in spare.get("/readyz").json()["reason"]
    assert "registered, waits as a spare epoch=" in spare.log()
    assert first.terminate() == 0
    assert spare.until_status(lambda s: s.worker_ready).slot == 0


def test_fragments_sync_in_turn_through_deaths_of_worker_and_controller(
    serve: Serve, connect: Callable[[str], SynchronizerClient], run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    more = ("--num-fragments", "3", "--policy-params", '{"h": 60}', "--max-h", "120")
    controller = run_service("controller", *controller_options(tmp_path, url, *more))
    port = int(controller.url.rpartition(":")[2])
    islands = islands_of(run_island, controller.url)
    for island in islands:
        island.until_progress(lambda p: p.round >= 4)
        assert island.status().num_fragments == 3
        assert "wadiloco_island_fragments 3.0" in island.get("/metrics").text
    done = controller.until(lambda: [r for r in rounds_of(controller) if r["closed"]][:4])
    assert [r["round"] for r in done] == [0, 1, 2, 3]
    assert all(sorted(r["slots_applied"]) == [0, 1] for r in done)
    os.kill(islands[0].status().worker_pid, signal.SIGKILL)
    islands[0].until_status(lambda s: s.restarts == 1 and s.worker_ready)
    reached = max(island.progress().round for island in islands)
    for island in islands:
        island.until_progress(lambda p, seen=reached: p.round >= seen + 2)
    controller.kill()
    reached = max(island.progress().round for island in islands)
    for island in islands:
        island.until_progress(lambda p, seen=reached: p.round >= seen + 2)
        assert "autonomous=True" in island.log()
    versions = [fragment.version for fragment in connect(url).state(deadline_s=time.time() + 20).fragments]
    assert max(versions) - min(versions) <= 1
    wrong = run_service("controller", *controller_options(tmp_path, url, "--num-fragments", "2"))
    assert wrong.finish(60) == 2
    assert "has 3, not 2" in wrong.lines[-1]
    again = run_service("controller", *controller_options(tmp_path, url, *more, port=port))
    for island in islands:
        island.until_status(lambda s: s.controller_reachable and s.unacknowledged_syncs == 0)
    reached = max(island.progress().round for island in islands)
    again.until(lambda: [r for r in rounds_of(again) if r["round"] > reached and len(r["slots_applied"]) == 2])
    assert again.get("/v1/budget").json()["spent"] >= reached


def test_a_controller_with_other_fragments_than_the_run_is_told(
    serve: Serve, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    alone = run_island("--slot", "1", "--synchronizer", url, "--num-fragments", "3")
    alone.until_status(lambda s: s.worker_ready)
    controller = run_service("controller", *controller_options(tmp_path, url, "--num-fragments", "2"))
    other = run_island("--controller", controller.url, "--agent-id", "other")
    assert other.finish(60) == 4
    assert "it has 3 fragments against 2 here" in other.lines[-1]
    assert "--num-fragments 3" in other.lines[-1]
