"""The same training under torchft's DiLoCo and under this project's gives the same parameters.

torchft runs as it does in a fleet: a lighthouse, a manager for each island, gloo between them; ours through a real
synchronizer. Both in fp32, all islands in all rounds, with Nesterov's step at 0.7 and 0.9.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco import Island
from diloco.schema import SyncOutcome
from tests.diloco.conftest import REPOSITORY
from tests.diloco.loops import together
from tests.diloco.parity import OUTER_LR, OUTER_MOMENTUM, Task, Trainer

Serve = Callable[..., str]
RUN_S = 200.0

needs_torchft = pytest.mark.skipif(
    find_spec("torchft") is None, reason="torchft is not installed (Linux x86-64, Python 3.11 to 3.13: the dev extra)"
)


def run_torchft(task: Task, out: Path) -> None:
    """Run it to its end; whatever happens, no process of it is left."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log").open("w") as log:
        # A session of its own: whatever it has started can be ended with it.
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.diloco.torchft_islands", *task.arguments(), "--out", str(out)],
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
            start_new_session=True,
        )
        try:
            code = process.wait(RUN_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, (out / "log").read_text()[-4000:]


def train_ours(task: Task, slot: int, url: str, **options: object) -> Trainer:
    trainer = Trainer(task, slot)
    with Island(
        trainer.model,
        trainer.optimizer,
        synchronizer=url,
        slot=slot,
        sync_every=task.sync_every,
        **options,  # type: ignore[arg-type]
    ) as island:
        while island.version < task.num_rounds:
            trainer.backward()
            trainer.optimizer.step()
            report = island.step(tokens=task.tokens_per_step)
            assert report is None or report.outcome is SyncOutcome.APPLIED
    return trainer


def apart(tensors: list[Tensor]) -> float:
    """Largest difference between any two."""
    return max(float((a - b).abs().max()) for a in tensors for b in tensors)


@pytest.mark.integration
@pytest.mark.timeout(300)
@needs_torchft
@pytest.mark.parametrize("num_islands", [2, 3])
def test_parameters_are_those_of_torchft(serve: Serve, tmp_path: Path, num_islands: int) -> None:
    task = Task(num_islands=num_islands)
    run_torchft(task, tmp_path / "torchft")
    theirs = [torch.load(tmp_path / "torchft" / f"island-{slot}.pt", weights_only=True) for slot in range(num_islands)]
    url = serve(tmp_path / "ours", quorum=num_islands, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM)
    trainers = together([lambda slot=slot: train_ours(task, slot, url) for slot in range(num_islands)])  # type: ignore[misc]
    ours = [trainer.flat() for trainer in trainers]
    assert apart(ours) == 0.0
    assert apart(theirs) == 0.0
    start = Trainer(task, 0).flat()
    moved = float((ours[0] - start).abs().max())
    assert moved > 0.01
    # The same sums in another order.
    assert apart([ours[0], theirs[0]]) < 1e-4 * moved
