"""The built-in trainer as a process that a bench starts, switches and counts: one mode per line on stdin.

    python -m tests.bench.gated_trainer     MODE [GATE_FOLDER [SOURCES]]  →  steps so far, seconds yielded so far

Takes real inner steps of the default model under ``SCHED_IDLE``, on random bytes. ``rest`` is a gate that is closed,
``run`` one that is open; a step that a switch finds half done goes on in the next mode that lets it. Steps are counted
in safepoints passed, so that short stretches count in full.
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
from diloco.safepoint import Gate, Safepoint, hooked, layers_of
from diloco.scheduling import become_idle, lower_session
from sidecar.vllm_plugin.gate_reader import ALL_SOURCES, GateReader, GateReason, GateState

BATCH_SIZE = 4
FIXED = {"rest": GateState(True, GateReason.NO_PACE), "run": GateState(False, GateReason.IDLE)}


class SwitchedGate:
    """The gate of the mode that was asked for last."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, int], GateReader] = {}
        self._state: GateState | None = FIXED["rest"]
        self._reader: Gate | None = None

    def choose(self, mode: str, folder: str | None, sources: int) -> None:
        if folder is None:
            self._state = FIXED[mode]
            return
        known = self._readers.get((folder, sources))
        self._readers[folder, sources] = self._reader = known or GateReader(Path(folder), sources=sources)
        self._state = None

    def read(self, now_s: float) -> GateState:
        state, reader = self._state, self._reader
        return state if state is not None else reader.read(now_s) if reader is not None else FIXED["rest"]


class Trainer:
    def __init__(self) -> None:
        size = ModelSize()
        self._model = build_model(size, seed=0)
        self._layers = layers_of(self._model)
        self._batch = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, size.context + 1))
        self._passes = 0
        self.gate = SwitchedGate()
        self.safepoint = Safepoint(self.gate)
        self._loop = InnerLoop(self._model, InnerConfig(), safepoint=self.count)

    @property
    def steps(self) -> float:
        """One before and one after each layer's two passes is shared with its neighbour; one before the update."""
        return self._passes / (2 * len(self._layers) + 1)

    def count(self) -> None:
        self.safepoint()
        self._passes += 1

    def run(self) -> None:
        become_idle()
        lower_session()
        with hooked(self._layers, self.count):
            while True:
                self._loop.take_step(self._batch)


def obey(trainer: Trainer) -> None:
    for line in sys.stdin:
        mode, *rest = line.split()
        trainer.gate.choose(mode, rest[0] if rest else None, int(rest[1]) if len(rest) > 1 else ALL_SOURCES)
        sys.stdout.write(json.dumps({"steps": trainer.steps, "yielded_s": trainer.safepoint.yielded.total_s}) + "\n")
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    trainer = Trainer()
    # Started before the main thread goes idle, so that counting does not wait for a core.
    threading.Thread(target=obey, args=(trainer,), daemon=True).start()
    trainer.run()


if __name__ == "__main__":
    main()
