"""Islands that train a researcher's own model, as real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.diloco.agent.conftest import REPOSITORY, IslandService

pytestmark = pytest.mark.integration

Run = Callable[..., Any]
Serve = Callable[..., str]
RunIsland = Callable[..., IslandService]
EXAMPLE = REPOSITORY / "examples" / "own_model"

NOTED = '''
import os
import torch
from torch import nn
from diloco.workload import Workload

class Noted(Workload):
    """Writes down which batch was taken by which process."""

    def build_model(self, *, seed):
        return nn.Linear(2, 1)

    def batches(self, shard, *, position):
        with open("taken", "a", buffering=1) as taken:
            while True:
                taken.write(f"{os.getpid()} {position}\\n")
                yield torch.randn(4, 2, generator=torch.Generator().manual_seed(position))
                position += 1

    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def count_tokens(self, batch):
        return len(batch)

class Misshapen(Noted):
    def loss(self, model, batch):
        return model(batch[:, :1]).mean()

class Ending(Noted):
    def batches(self, shard, *, position):
        return iter([torch.ones(4, 2)] * 20)

class Spoilt(Noted):
    """One of its samples cannot be read."""

    def batches(self, shard, *, position):
        for index, batch in enumerate(super().batches(shard, position=position), position):
            if index == 30:
                raise ValueError("spoilt")
            yield batch

class SpoiltForOneRank(Spoilt):
    """Only the second of two ranks of slot 0 has the sample that cannot be read."""

    def batches(self, shard, *, position):
        assert (shard.slot, shard.num_shards) in {(0, 32), (16, 32)}
        return (super().batches if shard.slot else super(Spoilt, self).batches)(shard, position=position)

def lacking():
    open("/nowhere/points")
'''


@pytest.fixture
def run_own(tmp_path: Path) -> Iterator[RunIsland]:
    """Starts an island with a workload in the folder ``cwd``."""
    running: list[IslandService] = []

    def start(workload: str, *options: str, cwd: Path) -> IslandService:
        common = ("--port", "0", "--no-idle-priority", "--workload", workload)
        running.append(IslandService("island", *common, *options, cwd=cwd))
        return running[-1]

    yield start
    for service in running:
        service.close()


def test_the_example_trains_on_two_islands_until_its_loss_has_fallen(
    run_service: Run, run_own: RunIsland, tmp_path: Path
) -> None:
    synchronizer = run_service("synchronizer", "--port", "0", "--directory", str(tmp_path / "sync"), "--quorum", "2")
    controller = run_service(
        "controller",
        *("--port", "0", "--journal", str(tmp_path / "journal.sqlite"), "--synchronizer-url", synchronizer.url),
        *("--policy", "fixed_h", "--policy-params", "h=200", "--min-h", "100", "--max-h", "4000", "--tick-s", "0.1"),
    )
    islands = [
        run_own(
            "spirals:make",
            *("--controller", controller.url, "--agent-id", f"island-{index}", "--lr", "0.01"),
            *("--workload-options", "width=24,batch_size=32"),
            cwd=EXAMPLE,
        )
        for index in range(2)
    ]
    for island in islands:
        island.until_progress(lambda p: p.round >= 3 and p.loss is not None and p.loss < 0.3)
        assert island.status().num_parameters == 2 * 24 + 24 + 24 * 24 + 24 + 24 + 1
        assert "outcome=applied" in island.log()
    for island in islands:
        assert island.terminate() == 0


@pytest.mark.parametrize("per_step", [1, 3])
def test_a_restarted_worker_goes_on_with_the_next_batch(
    serve: Serve, run_own: RunIsland, tmp_path: Path, per_step: int
) -> None:
    (tmp_path / "mine.py").write_text(NOTED)
    options = ("--slot", "0", "--synchronizer", serve(tmp_path / "sync"), "--accumulation-steps", str(per_step))
    island = run_own("mine:Noted", *options, cwd=tmp_path)
    island.until_progress(lambda p: p.step > 50)
    first_pid = island.status().worker_pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    status = island.until_status(lambda s: s.worker_ready and s.worker_pid != first_pid)
    reached = island.progress().step
    island.until_progress(lambda p: p.step > reached + 50)
    assert island.terminate() == 0
    taken: dict[int, list[int]] = {}
    for line in (tmp_path / "taken").read_text().splitlines():
        pid, position = map(int, line.split())
        taken.setdefault(pid, []).append(position)
    assert list(taken) == [first_pid, status.worker_pid]
    before, after = taken.values()
    assert before == list(range(len(before)))
    assert after == list(range(after[0], after[0] + len(after)))
    assert 50 * per_step < after[0] <= len(before)
    assert after[0] % per_step == 0


@pytest.mark.parametrize(
    ("factory", "num_starts", "code", "said"),
    [
        ("Misshapen", 1, 2, "workload: the first inner step raised RuntimeError: mat1 and mat2 shapes cannot be "),
        ("Ending", 1, 2, "workload: the batches ended at 20 (go on with a new epoch: batches has no end)"),
        ("Spoilt", 2, 2, "workload: inner step 30, once more, raised ValueError: spoilt ("),
        ("lacking", 2, 3, "worker: the worker failed 2 times at its start: workload: lacking() raised FileNotFoundErr"),
    ],
)
def test_a_workload_that_cannot_go_on_ends_its_island_with_the_reason(
    serve: Serve, run_own: RunIsland, tmp_path: Path, factory: str, num_starts: int, code: int, said: str
) -> None:
    (tmp_path / "mine.py").write_text(NOTED)
    url = serve(tmp_path / "sync")
    options = ("--slot", "0", "--synchronizer", url, "--start-attempts", "2", "--restart-backoff-s", "0.1")
    island = run_own(f"mine:{factory}", *options, cwd=tmp_path)
    assert island.finish(60) == code
    assert island.lines[-1].startswith(f"wadiloco island: {said}")
    assert island.log().count("worker started") == num_starts


def test_what_only_one_of_two_ranks_cannot_read_ends_the_island_with_the_reason(
    serve: Serve, run_own: RunIsland, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(NOTED)
    options = ("--slot", "0", "--synchronizer", serve(tmp_path / "sync"), "--ranks", "2", "--restart-backoff-s", "0.1")
    island = run_own("mine:SpoiltForOneRank", *options, cwd=tmp_path)
    assert island.finish(60) == 2
    assert island.lines[-1].startswith(
        "wadiloco island: workload: inner step 30, once more, raised ValueError: spoilt ("
    )


def test_another_model_is_refused_with_the_first_difference(serve: Serve, run_own: RunIsland, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NOTED)
    url = serve(tmp_path / "sync")
    first = run_own("mine:Noted", "--slot", "0", "--synchronizer", url, cwd=tmp_path)
    first.until_status(lambda s: s.worker_ready)
    other = run_own("spirals:make", "--slot", "1", "--synchronizer", url, cwd=EXAMPLE)
    assert other.finish(60) == 4
    assert "parameter 0 is bias [1] float32 against 0.bias [32] float32" in other.lines[-1]
    assert "--workload" in other.lines[-1]
