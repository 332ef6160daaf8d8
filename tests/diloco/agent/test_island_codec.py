"""An island that encodes its contributions: told in its status and metrics, and honest about what a restart loses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.codec import CODECS

pytestmark = pytest.mark.integration

RunIsland = Callable[..., Any]
Serve = Callable[..., str]
LOST = "what the codec left out of the slot's contributions so far is lost codec=int4"


def test_it_pushes_encoded_bytes_and_says_what_a_restart_loses(
    serve: Serve, run_island: RunIsland, tmp_path: Path
) -> None:
    options = ("--slot", "0", "--synchronizer", serve(tmp_path / "sync"), "--codec", "int4")
    island = run_island(*options, "--no-vault")  # from a snapshot nothing is lost

    def metric(name: str) -> float | None:
        lines = island.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), None)

    status = island.until_status(lambda s: s.worker_ready)
    assert status.codec == "int4"
    assert metric('wadiloco_island_codec_info{codec="int4"}') == 1
    island.until_progress(lambda p: p.step > 0 and p.residual_norm == 0)
    assert LOST not in island.log()
    island.until(lambda: metric('wadiloco_island_syncs_total{outcome="applied"}'))
    pushed = metric('wadiloco_island_sync_bytes_total{direction="push"}')
    syncs = metric('wadiloco_island_syncs_total{outcome="applied"}')
    assert pushed is not None
    assert pushed == pytest.approx((syncs or 0) * CODECS["int4"].num_bytes(status.num_parameters))
    island.until_progress(lambda p: (p.residual_norm or 0.0) > 0)
    assert (metric("wadiloco_island_residual_norm") or 0.0) > 0
    os.kill(status.worker_pid, signal.SIGKILL)
    island.until_status(lambda s: s.worker_ready and s.worker_pid != status.worker_pid)
    assert LOST in island.log()


def test_a_codec_that_does_not_exist_is_refused_by_name(run_island: RunIsland) -> None:
    island = run_island("--slot", "0", "--synchronizer", "http://127.0.0.1:1", "--codec", "int3")
    assert island.finish(30) == 2
    assert "codec" in island.log()
