"""An island agent whose worker dies or hangs: the next one goes on from the vault."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.schema import Phase, Progress, Restart, Rung
from tests.diloco.agent.test_island_alone import alone, is_alive

pytestmark = pytest.mark.integration

RunIsland = Callable[..., Any]
Serve = Callable[..., str]


def until_restarted(island: Any, *, after: Restart | None = None) -> Restart:
    record = island.until_status(lambda s: s.last_restart is not None and s.last_restart != after).last_restart
    assert isinstance(record, Restart)
    return record


def until_protected(island: Any) -> None:
    island.until_status(lambda s: s.protection is not None and s.protection.generation is not None)


def test_a_killed_worker_goes_on_from_its_snapshot_and_the_recovery_is_told(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")))
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    before = island.until_progress(lambda p: p.step > 20)
    os.kill(pid, signal.SIGKILL)
    record = until_restarted(island)
    assert (record.rung, record.lost, record.steps_lost) == (Rung.VAULT, "", 0)
    assert record.cause == "killed by SIGKILL"
    assert record.fetched_s is not None
    assert record.loaded_s is not None
    assert record.first_step_s is not None
    assert record.detected_s <= record.fetched_s <= record.loaded_s <= record.first_step_s
    after = island.until_progress(lambda p: p.phase is Phase.INNER and p.step > before.step)
    # Nothing was synced, and nothing lost: all steps are still there.
    assert after.inner_steps_since_sync == after.step
    assert after.tokens == after.step * 64
    assert after.restarts == 1
    assert "recovered rank=0 cause=killed by SIGKILL rung=vault" in island.log()
    status = island.status()
    assert status.protection is not None
    assert status.protection.steps_at_risk is not None
    assert "vault rank=0 mb=" in island.log()
    assert island.terminate() == 0
    assert list((tmp_path / "vaults").iterdir()) == []


def test_a_stopped_worker_is_killed_within_three_timeouts_and_replaced(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--failure-timeout-s", "2")
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    until_protected(island)
    os.kill(pid, signal.SIGSTOP)
    record = until_restarted(island)
    assert record.rung is Rung.VAULT
    assert record.cause.startswith("silent for ")
    assert not is_alive(pid)
    assert record.last_sign_s is not None
    assert record.detected_s - record.last_sign_s < 3 * 2


def test_an_agent_that_was_stopped_itself_takes_nobody_for_dead(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--failure-timeout-s", "1")
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    island.until_progress(lambda p: p.step > 5)
    os.kill(island.process.pid, signal.SIGSTOP)
    threading.Event().wait(4)
    os.kill(island.process.pid, signal.SIGCONT)
    step = island.progress().step
    island.until_progress(lambda p: p.step > step + 20)
    assert island.status().worker_pid == pid
    assert island.status().restarts == 0


def test_a_worker_in_reserve_takes_the_place_of_a_dead_one_and_is_replaced(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--standby-workers", "1")
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    (reserve,) = island.until_status(lambda s: s.standby_pids).standby_pids
    until_protected(island)
    os.kill(pid, signal.SIGKILL)
    record = until_restarted(island)
    assert record.rung is Rung.VAULT
    assert island.status().worker_pid == reserve
    (second,) = island.until_status(lambda s: s.standby_pids and s.standby_pids != (reserve,)).standby_pids
    os.kill(second, signal.SIGKILL)
    os.kill(reserve, signal.SIGKILL)
    record = until_restarted(island, after=record)
    assert record.rung is Rung.VAULT
    assert island.terminate() == 0
    assert not any(map(is_alive, (pid, reserve, second)))


def test_without_a_vault_the_next_worker_starts_from_the_global_parameters_and_the_loss_is_stated(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--no-vault")
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    island.until_progress(lambda p: p.step > 20)
    os.kill(pid, signal.SIGKILL)
    record = until_restarted(island)
    assert record.rung is Rung.GLOBAL
    assert record.steps_lost > 0
    assert f"{record.steps_lost} inner steps since the last sync" in record.lost
    assert island.status().protection is None


def test_a_vault_without_room_degrades_protection_and_stops_no_step(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    island = run_island(*alone(serve(tmp_path / "sync")), "--vault-dir", str(tmp_path / "file"))
    status = island.until_status(lambda s: s.protection is not None and s.protection.reason)
    assert status.protection.steps_at_risk is None
    island.until_progress(lambda p: p.step > 50)
    assert island.log().count("protection degraded") == 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_either_may_die(serve: Serve, run_island: RunIsland, tmp_path: Path, rank: int) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--ranks", "2", "--shard-optimizer")
    pids = island.until_status(lambda s: s.worker_ready).worker_pids
    until_protected(island)

    def trains(progress: Progress) -> bool:
        return progress.step > 20

    island.until_progress(trains)
    os.kill(pids[rank], signal.SIGKILL)
    record = until_restarted(island)
    assert (record.rung, record.rank, record.lost) == (Rung.VAULT, rank, ""), record
    after = island.until_progress(lambda p: p.step > record.from_step + 5)
    assert after.inner_steps_since_sync == after.step


def test_an_agent_that_was_killed_goes_on_from_what_it_left_in_memory(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync")
    first = run_island(*alone(url))
    until_protected(first)
    before = first.until_progress(lambda p: p.step > 20)
    first.kill()
    second = run_island(*alone(url), "--resume")
    after = second.until_progress(lambda p: p.phase is Phase.INNER and p.step > before.step)
    assert after.inner_steps_since_sync == after.step
    assert "found the vault of an agent that is gone" in second.log()


def test_an_agent_that_ended_in_order_goes_on_from_the_disk_and_a_broken_copy_is_left(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    url, disk = serve(tmp_path / "sync"), tmp_path / "disk"
    first = run_island(*alone(url), "--snapshot-dir", str(disk), "--snapshot-every-s", "1")
    until_protected(first)

    def copies() -> list[Path]:
        return sorted(disk.glob("*/*.vault"), key=lambda path: int(path.name.partition("-")[0]))

    first.until(lambda: first.log().count("snapshot on disk") >= 3)
    assert first.terminate() == 0
    step = int(first.log().rpartition("snapshot on disk step=")[2].split()[0])
    assert len(copies()) == 2
    assert not list(disk.glob("*/*.part"))
    assert list((tmp_path / "vaults").iterdir()) == []

    copies()[-1].write_bytes(copies()[-1].read_bytes()[:-5000])
    second = run_island(*alone(url), "--snapshot-dir", str(disk), "--resume")
    after = second.until_progress(lambda p: p.phase is Phase.INNER and p.inner_steps_since_sync > 0)
    assert 0 < after.inner_steps_since_sync == after.step
    assert "a snapshot on disk cannot be used" in second.log()
    assert "going on from a snapshot on disk" in second.log()
    second.until_progress(lambda p: p.step > step)
