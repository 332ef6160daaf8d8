"""Scalars for TensorBoard. What reads them back runs where tensorboard is installed."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.agent.outer_log import log_outer_step
from diloco.agent.preflight import check_tensorboard
from diloco.protocol import ProgressEvent, ReadyEvent, SyncedEvent
from diloco.scalars import ScalarLog, progress_scalars, sync_scalars
from diloco.schema import Progress, SyncOutcome, SyncReport
from service.errors import ConfigError, UnavailableError
from tests.diloco.agent.conftest import IslandService, corpus, run_island

__all__ = ["corpus", "run_island"]
is_installed = importlib.util.find_spec("tensorboard") is not None
needs_tensorboard = pytest.mark.skipif(
    not is_installed, reason="tensorboard is not installed: pip install 'wadiloco[train,tensorboard]'"
)

REPORT = SyncReport(
    round=3,
    outcome=SyncOutcome.APPLIED,
    started_s=100.0,
    finished_s=101.5,
    blocked_s=0.25,
    bytes_pushed=170,
    bytes_pulled=1300,
    inner_steps=64,
    tokens=4096,
    staleness=1,
)


def progress(step: int, loss: float | None = 2.0) -> Progress:
    return Progress(step=step, inner_steps_since_sync=step, tokens=64 * step, tokens_since_sync=64 * step, loss=loss)


def test_what_is_unknown_has_no_value() -> None:
    told = dict(progress_scalars(progress(5, loss=None), lr=0.1))
    assert (told["train/lr"], told["train/tokens"], told["train/loss"]) == (0.1, 320, None)


def test_an_outer_step_tells_what_it_cost() -> None:
    assert dict(sync_scalars(REPORT)) == {
        "outer/applied": 1.0,
        "outer/inner_steps": 64,
        "outer/bytes_pushed": 170,
        "outer/bytes_pulled": 1300,
        "outer/blocked_s": 0.25,
        "outer/staleness": 1,
    }


@pytest.mark.parametrize(("blocked_s", "expected"), [(None, 1.5), (0.25, 0.25)])
def test_without_overlap_a_sync_blocks_all_the_time(blocked_s: float | None, expected: float) -> None:
    assert REPORT.model_copy(update={"blocked_s": blocked_s}).kept_from_steps_s == expected


def test_an_outer_step_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_outer_step(REPORT, loss=2.5)
    (line,) = caplog.messages
    for part in ("round=3", "outcome=applied", "inner_steps=64", "tokens=4096", "loss=2.5000", "staleness=1"):
        assert part in line
    assert "blocked_s=0.250 bytes_pushed=170 bytes_pulled=1300" in line


@pytest.mark.skipif(is_installed, reason="tensorboard is installed")
def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"tensorboard is not installed .*wadiloco\[tensorboard\]"):
        check_tensorboard(tmp_path)


@needs_tensorboard
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"tensorboard: cannot make .*file/runs: Not a directory"):
        check_tensorboard(tmp_path / "file" / "runs")


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {
        name: [(each.step, round(each.value, 6)) for each in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


@needs_tensorboard
def test_a_later_worker_replaces_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    for start_step, steps, loss in ((0, (1, 5, 9), 2.0), (5, (7, 12), 1.0)):
        scalars = ScalarLog(tmp_path, start_step=start_step, lr=lambda: 0.5)
        scalars.take(ReadyEvent(num_parameters=1, version=0))
        for step in (start_step, *steps, steps[-1]):
            scalars.take(ProgressEvent(progress=progress(step, loss)))
        scalars.take(SyncedEvent(report=REPORT))
        scalars.close()
    told = read(tmp_path)
    assert told["train/loss"] == [(1, 2.0), (5, 2.0), (7, 1.0), (12, 1.0)]
    assert told["train/lr"][-1] == (12, 0.5)
    assert told["outer/bytes_pushed"] == [(12, 170.0)]
    assert "outer/update_norm" not in told


@needs_tensorboard
def test_a_disk_that_fails_ends_the_scalars_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scalars = ScalarLog(tmp_path, start_step=0, lr=lambda: 0.5)
    assert scalars._writer is not None

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    scalars._writer.flush = fail  # type: ignore[method-assign]
    scalars.take(SyncedEvent(report=REPORT))
    scalars.take(SyncedEvent(report=REPORT))
    scalars.close()
    assert caplog.text.count("no more scalars for TensorBoard error=[Errno 28] No space left on device") == 1


@needs_tensorboard
@pytest.mark.integration
def test_an_island_writes_its_run_over_a_restart_of_its_worker(
    serve: Callable[..., str], run_island: Callable[..., IslandService], tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    options: tuple[Any, ...] = ("--slot", "1", "--synchronizer", url, "--tensorboard", str(tmp_path / "runs"))
    island = run_island(*options, "--lr-schedule", "cosine", "--decay-steps", "40", "--min-lr", "0.001")
    first = island.until_status(lambda s: s.worker_ready).worker_pid
    assert first is not None
    island.until_progress(lambda p: p.round >= 1 and p.step > 50)
    os.kill(first, signal.SIGKILL)
    island.until_status(lambda s: s.worker_ready and s.worker_pid != first)
    reached = island.progress().step
    island.until_progress(lambda p: p.step > reached + 20)
    assert island.terminate() == 0
    told = read(tmp_path / "runs" / "slot-1")
    steps = [step for step, _ in told["train/loss"]]
    assert steps == sorted(set(steps))
    assert told["train/lr"][-1][1] == 0.001
    assert told["outer/bytes_pulled"][0][1] == told["outer/bytes_pushed"][0][1] > 0
