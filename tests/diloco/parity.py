"""One training task for two implementations of DiLoCo: the same model, the same batches, the same inner optimizer.

Needs torch and `diloco.model` alone.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.model import ModelSize, build_model, next_byte_loss

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
RUN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """Sizes of a run; also the command line of a process that takes part in one."""

    num_islands: int = 2
    num_rounds: int = 4
    sync_every: int = 5
    width: int = 32
    num_layers: int = 2
    context: int = 16
    batch_size: int = 4

    @property
    def size(self) -> ModelSize:
        return ModelSize(num_layers=self.num_layers, num_heads=2, width=self.width, context=self.context)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.context

    def arguments(self) -> list[str]:
        return [part for name, value in asdict(self).items() for part in (f"--{name}", str(value))]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        for name, value in asdict(cls()).items():
            parser.add_argument(f"--{name}", type=int, default=value)

    @classmethod
    def parse(cls, options: argparse.Namespace) -> Task:
        return cls(**{name: getattr(options, name) for name in asdict(cls())})


class Trainer:
    """One island's model and inner optimizer, on bytes that follow from slot and step."""

    def __init__(self, task: Task, slot: int) -> None:
        self._task = task
        self._slot = slot
        self.model: nn.Module = build_model(task.size, seed=3)
        # AdamW divides by the size of a gradient. With its usual eps of 1e-8, what fp32 rounds away in a gradient that
        # is next to nothing is a whole step.
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-4)
        self.num_steps = 0

    def backward(self) -> None:
        """Gradients of the next batch; the optimizer's step is the caller's."""
        generator = torch.Generator().manual_seed(1000 * self._slot + self.num_steps)
        shape = (self._task.batch_size, self._task.context + 1)
        # Differences of neighbours are small: there is something to learn.
        tokens = torch.randint(0, 3, shape, generator=generator).cumsum(1) + 16 * self._slot
        self.optimizer.zero_grad()
        next_byte_loss(self.model, tokens).backward()  # type: ignore[no-untyped-call]
        self.num_steps += 1

    def flat(self) -> Tensor:
        """All parameters by name, (parameters,) fp32."""
        named = sorted(self.model.named_parameters())
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in named])


class Stopwatch:
    """Wall times of parts of a run."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.times_s.append(time.perf_counter() - self._began_s)


def run_islands(command: Sequence[str], *, num_islands: int) -> int:
    """One process per slot; the worst of their exit codes. None is left, whatever happens."""
    islands = [subprocess.Popen([*command, "--slot", str(slot)]) for slot in range(num_islands)]
    try:
        return max(abs(island.wait(RUN_S)) for island in islands)
    finally:
        for island in islands:
            island.kill()
            island.wait()
