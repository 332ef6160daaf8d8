"""The built-in trainer as a process that a bench starts, stops and counts: one mode per line on stdin.

    python -m tests.bench.gated_trainer     MODE [GATE_FOLDER [SOURCES]]  →  steps so far, seconds yielded so far

Takes real inner steps of the default model under ``SCHED_IDLE``, on random bytes. ``rest`` takes none.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch

from diloco.inner import InnerConfig, InnerLoop
from diloco.model import VOCAB_SIZE, ModelSize, build_model
from diloco.safepoint import Safepoint, YieldInterrupted, hooked, layers_of, pass_by
from diloco.scheduling import become_idle
from sidecar.vllm_plugin.gate_reader import ALL_SOURCES, GateReader

BATCH_SIZE = 4


class Trainer:
    """Steps in the mode that was asked for last."""

    def __init__(self) -> None:
        size = ModelSize()
        self._model = build_model(size, seed=0)
        self._safepoint: Safepoint | None = None
        self._loop = InnerLoop(self._model, InnerConfig(), safepoint=lambda: self.pass_safepoint())
        self._batch = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, size.context + 1))
        self._wanted = threading.Event()
        self._changed = False
        self.steps = 0
        self._yielded_s = 0.0

    @property
    def yielded_s(self) -> float:
        return self._yielded_s + (self._safepoint.yielded.total_s if self._safepoint else 0.0)

    def pass_safepoint(self) -> None:
        (self._safepoint or pass_by)()

    def choose(self, mode: str, gate: str | None, sources: int) -> None:
        self._yielded_s = self.yielded_s
        self._safepoint = (
            Safepoint(GateReader(Path(gate), sources=sources), has_order=lambda: self._changed) if gate else None
        )
        self._changed = True
        (self._wanted.clear if mode == "rest" else self._wanted.set)()

    def run(self) -> None:
        become_idle()
        with hooked(layers_of(self._model), self.pass_safepoint):
            while True:
                self._changed = False
                self._wanted.wait()
                try:
                    self.pass_safepoint()
                    self._loop.take_step(self._batch)
                except YieldInterrupted:
                    continue
                self.steps += 1


def obey(trainer: Trainer) -> None:
    for line in sys.stdin:
        mode, *rest = line.split()
        gate = rest[0] if rest else None
        sys.stdout.write(json.dumps({"steps": trainer.steps, "yielded_s": trainer.yielded_s}) + "\n")
        sys.stdout.flush()
        trainer.choose(mode, gate, int(rest[1]) if len(rest) > 1 else ALL_SOURCES)
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    trainer = Trainer()
    # Started before the main thread goes idle, so that counting does not wait for a core.
    threading.Thread(target=obey, args=(trainer,), daemon=True).start()
    trainer.run()


if __name__ == "__main__":
    main()
