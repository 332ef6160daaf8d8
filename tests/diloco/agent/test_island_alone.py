"""An island agent without a controller: supervision of its worker, and clean ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.schema import Phase

pytestmark = pytest.mark.integration

RunIsland = Callable[..., Any]
Serve = Callable[..., str]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def alone(url: str) -> tuple[str, ...]:
    return ("--slot", "0", "--synchronizer", url)


def test_it_trains_and_tells_about_it(serve: Serve, run_island: RunIsland, tmp_path: Path) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")))
    island.until(lambda: island.get("/readyz").status_code == 200)
    island.until_progress(lambda p: p.step > 20 and p.phase is Phase.INNER)
    status = island.status()
    assert (status.slot, status.worker_ready, status.controller_reachable) == (0, True, None)
    assert status.num_parameters
    assert island.get("/healthz").json()["status"] == "ok"
    metrics = island.get("/metrics").text
    assert "wadiloco_island_loss " in metrics
    assert 'wadiloco_island_syncs_total{outcome="applied"} 0.0' in metrics
    assert "wadiloco_island_controller_up" not in metrics
    assert "wadiloco_island_last_sync_timestamp_seconds " not in metrics


def test_sigterm_ends_agent_and_worker_cleanly(serve: Serve, run_island: RunIsland, tmp_path: Path) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")))
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    island.until_progress(lambda p: p.step > 0)
    assert island.terminate() == 0
    assert not is_alive(pid)
    assert "code=0 why=stopped" in island.log()


def test_a_worker_is_not_restarted_on_other_text(
    serve: Serve, run_island: RunIsland, corpus: Path, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")))
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    whole = corpus.stat().st_size
    os.truncate(corpus, 5000)
    os.kill(pid, signal.SIGKILL)
    assert island.finish(60) == 2
    assert f"wadiloco island: data: {corpus} has 5000 bytes and had {whole}, so " in island.lines[-1]
    assert "put it back" in island.lines[-1]
    assert island.log().count("worker started") == 1


def test_a_killed_worker_is_restarted_and_goes_on_from_its_step_without_a_snapshot_too(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--no-vault")
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    before = island.until_progress(lambda p: p.step > 20)
    os.kill(pid, signal.SIGKILL)
    status = island.until_status(lambda s: s.worker_ready and s.worker_pid != pid)
    assert status.restarts == 1
    after = island.until_progress(lambda p: p.phase is Phase.INNER and p.inner_steps_since_sync > 0)
    assert after.step >= before.step
    assert after.inner_steps_since_sync < after.step
    assert after.restarts == 1
    assert after.tokens == after.step * 64


def test_a_killed_agent_takes_its_worker_along(serve: Serve, run_island: RunIsland, tmp_path: Path) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")))
    pid = island.until_status(lambda s: s.worker_ready).worker_pid
    # The log pipe is shared with the worker: it ends when both are gone.
    island.kill()
    assert not is_alive(pid)


def test_bad_data_path_ends_the_agent_with_one_clear_error(run_island: RunIsland, tmp_path: Path) -> None:
    island = run_island(*alone("http://127.0.0.1:1"), "--data", str(tmp_path / "nowhere"))
    assert island.finish(30) == 2
    assert "nowhere does not exist" in island.lines[-1]
    assert "Traceback" not in island.log()


def test_another_model_than_the_run_ends_the_agent(serve: Serve, run_island: RunIsland, tmp_path: Path) -> None:
    url = serve(tmp_path / "sync")
    first = run_island(*alone(url))
    first.until_status(lambda s: s.worker_ready)
    second = run_island(*alone(url), "--width", "64")
    assert second.finish(30) == 4
    assert "differs from the run" in second.lines[-1]
    assert second.lines[-1].count("a synchronizer with a new --directory") == 1


def test_without_synchronizer_it_waits_and_still_stops_at_once(run_island: RunIsland) -> None:
    island = run_island(*alone("http://127.0.0.1:1"))
    island.until(lambda: "no synchronizer yet" in island.log())
    assert island.get("/readyz").status_code == 503
    assert island.terminate() == 0
