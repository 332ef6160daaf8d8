"""The picture of a replay: for each run load, training, syncs and SLO violations over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# All times are seconds after the start of the load.


@dataclass(frozen=True, slots=True)
class RequestPoint:
    arrival_s: float
    latency_ms: float | None
    """The latency that the objective judges; None when the request failed."""
    violated: bool


@dataclass(frozen=True, slots=True)
class LoadPoint:
    t_s: float
    running: float
    """Over all servers."""
    waiting: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    t_s: float
    steps: int
    """Inner steps of all islands since the run began."""


@dataclass(frozen=True, slots=True)
class SyncWindow:
    start_s: float
    end_s: float
    slot: int


@dataclass(frozen=True, slots=True)
class RunTimeline:
    label: str
    duration_s: float
    requests: tuple[RequestPoint, ...]
    load: tuple[LoadPoint, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    syncs: tuple[SyncWindow, ...] = ()


def draw_timeline(runs: Sequence[RunTimeline], path: Path, *, slo: str, threshold_ms: float, title: str) -> None:
    """Write the PNG: one row of panels per run."""
    raise NotImplementedError
