"""The task of ``parity`` under this project's islands: a process for each, as in ``torchft_islands``.

``python -m tests.diloco.library_islands --out DIR`` starts a synchronizer and the islands, and ends with all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from diloco import Island
from tests.diloco.conftest import SynchronizerProcess
from tests.diloco.parity import OUTER_LR, OUTER_MOMENTUM, Stopwatch, Task, Trainer, run_islands


def train(task: Task, slot: int, url: str, codec: str, out: Path) -> None:
    trainer, watch = Trainer(task, slot), Stopwatch()
    sent: list[int] = []
    received: list[int] = []
    with Island(
        trainer.model,
        trainer.optimizer,
        synchronizer=url,
        slot=slot,
        sync_every=task.sync_every,
        codec=codec,  # type: ignore[arg-type]
    ) as island:
        while island.version < task.num_rounds:
            trainer.backward()
            with watch:
                trainer.optimizer.step()
                report = island.step(tokens=task.tokens_per_step)
            if report is not None:
                sent.append(report.bytes_pushed)
                received.append(report.bytes_pulled)
    torch.save(trainer.flat(), out / f"island-{slot}.pt")
    last = slice(task.sync_every - 1, None, task.sync_every)
    result = {"sync_s": watch.times_s[last], "step_s": watch.times_s, "sent": sent, "received": received}
    (out / f"island-{slot}.json").write_text(json.dumps(result))


def serve(task: Task, codec: str, out: Path) -> int:
    synchronizer = SynchronizerProcess(
        out / "state",
        *("--quorum", str(task.num_islands), "--outer-lr", str(OUTER_LR), "--outer-momentum", str(OUTER_MOMENTUM)),
    )
    command = [sys.executable, "-m", "tests.diloco.library_islands", *task.arguments(), "--out", str(out)]
    try:
        command += ["--codec", codec, "--synchronizer", synchronizer.url]
        return run_islands(command, num_islands=task.num_islands)
    finally:
        synchronizer.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    Task.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--slot", type=int)
    parser.add_argument("--synchronizer", default="")
    options = parser.parse_args()
    task = Task.parse(options)
    torch.set_num_threads(1)
    if options.slot is None:
        return serve(task, options.codec, options.out)
    train(task, options.slot, options.synchronizer, options.codec, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
