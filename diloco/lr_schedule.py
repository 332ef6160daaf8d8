"""The learning rate of each inner step: a linear warm-up, then constant, or a decay to a floor.

With n = step + 1 the number of the inner step, W warm-up steps, D decay steps and r = min_lr / lr, the share of the
peak is

    n ≤ W                      n / W
    constant                   1
    cosine, W < n < D          r + (1 - r) · (1 + cos(π·x)) / 2        x = (n - W) / (D - W)
    linear, W < n < D          1 - (1 - r) · x
    n ≥ D                      r

Cosine is that of Loshchilov & Hutter (2017, arXiv 1608.03983) without restarts. D counts from the first step of the
run, the warm-up included. The rate is a function of the step alone: a worker that goes on at a step has the rate that
the one before it would have had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """How a peak learning rate is reached and left."""

    name: ScheduleName = "constant"
    warmup_steps: int = 50
    decay_steps: int | None = None
    """Inner step at which the floor is reached; None for constant alone."""
    floor: float = 0.0
    """Lowest share of the peak that the decay goes down to."""

    def __post_init__(self) -> None:
        fault = schedule_fault(
            self.name, warmup_steps=self.warmup_steps, decay_steps=self.decay_steps, min_lr=self.floor, lr=1.0
        )
        if fault is not None:
            raise ValueError(fault)


def schedule_fault(
    name: ScheduleName, *, warmup_steps: int, decay_steps: int | None, min_lr: float, lr: float
) -> str | None:
    """What contradicts what in a schedule, with the remedy; None where nothing does."""
    if name == "constant":
        if decay_steps is not None:
            return "decay_steps is for a schedule that decays: give --lr-schedule cosine or linear, or leave it out"
        if min_lr:
            return "min_lr is for a schedule that decays: give --lr-schedule cosine or linear, or leave it out"
        return None
    if decay_steps is None:
        return f"lr_schedule {name} needs decay_steps: give the inner step at which the learning rate is at its lowest"
    if decay_steps <= warmup_steps:
        return (
            f"decay_steps {decay_steps} must be above warmup_steps {warmup_steps}: it counts from the first step, "
            "the warm-up included"
        )
    if min_lr > lr:
        return f"min_lr {min_lr:g} must not be above lr {lr:g}, the peak"
    return None


def lr_share(step: int, schedule: LrSchedule) -> float:
    """Share of the peak learning rate that the ``step``-th inner step of the run has, counted from 0."""
    number = step + 1
    if number <= schedule.warmup_steps:
        return number / schedule.warmup_steps
    if schedule.decay_steps is None:
        return 1.0
    decay = min(1.0, (number - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps))
    left = 1.0 - decay if schedule.name == "linear" else (1.0 + math.cos(math.pi * decay)) / 2.0
    return schedule.floor + (1.0 - schedule.floor) * left
