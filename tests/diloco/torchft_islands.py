"""The task of ``parity`` under torchft's DiLoCo, with its lighthouse, its managers and gloo: a process for each island.

``python -m tests.diloco.torchft_islands --out DIR`` ends by itself, and with it all that it started; each island leaves
its parameters (``island-<slot>.pt``) and times (``island-<slot>.json``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.diloco.parity import OUTER_LR, OUTER_MOMENTUM, Stopwatch, Task, Trainer, run_islands

TIMEOUT = timedelta(seconds=60)


def written_bytes() -> int:
    """What this process has written so far, into its sockets above all."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def train(task: Task, slot: int, lighthouse: str, out: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    trainer, watch = Trainer(task, slot), Stopwatch()
    outer = torch.optim.SGD(trainer.model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])

    def save() -> Any:
        return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=task.num_islands,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"island-{slot}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    sent: list[int] = []
    with DiLoCo(manager, [trainer.model], trainer.optimizer, outer, sync_every=task.sync_every):
        while manager.current_step() < task.num_rounds:
            trainer.backward()
            before = written_bytes()
            with watch:
                trainer.optimizer.step()
            sent.append(written_bytes() - before)
    torch.save(trainer.flat(), out / f"island-{slot}.pt")
    last = slice(task.sync_every - 1, None, task.sync_every)
    # What islands send in an all-reduce they receive, all together.
    result = {"sync_s": watch.times_s[last], "step_s": watch.times_s, "sent": sent[last], "received": sent[last]}
    (out / f"island-{slot}.json").write_text(json.dumps(result))
    manager.shutdown(wait=False)


def serve(task: Task, out: Path) -> int:
    """The lighthouse, and the islands as processes of their own; the worst of their exit codes."""
    from torchft._torchft import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=task.num_islands, join_timeout_ms=60_000)
    command = [sys.executable, "-m", "tests.diloco.torchft_islands", *task.arguments(), "--out", str(out)]
    address = lighthouse.address().replace("0.0.0.0", "127.0.0.1")  # noqa: S104 (read, not bound)
    try:
        return run_islands([*command, "--lighthouse", address], num_islands=task.num_islands)
    finally:
        lighthouse.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser()
    Task.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slot", type=int)
    parser.add_argument("--lighthouse", default="")
    options = parser.parse_args()
    task = Task.parse(options)
    torch.set_num_threads(1)
    if options.slot is None:
        return serve(task, options.out)
    # Whoever started it may be killed.
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    train(task, options.slot, options.lighthouse, options.out)
    return 0


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        threading.Event().wait(0.5)
    os._exit(3)


if __name__ == "__main__":
    sys.stdout.flush()
    # Threads of the managers would keep the interpreter.
    os._exit(main())
