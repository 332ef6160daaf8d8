"""From raw results to the parts of ``summary.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from replay.loadgen import RequestResult
from replay.slo import Slo
from replay.summary import Comparison, Machine, Run
from replay.timeline import SyncWindow


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """What training did during a run, over all islands."""

    outer_syncs: int = 0
    """Rounds of the whole run, not counted per island."""
    inner_steps: int = 0
    tokens_trained: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    sync_windows: tuple[SyncWindow, ...] = ()
    """In seconds after the start of the load."""


def summarize_run(
    results: Sequence[RequestResult],
    *,
    policy: str,
    seed: int,
    draw: int,
    slo: Slo,
    training: TrainingOutcome,
    mode: Literal["live", "sim"] = "live",
    errors: Sequence[str] = (),
    notes: Sequence[str] = (),
    started_unix_s: float | None = None,
) -> Run:
    """One row of the table. Cancelled requests do not count: the replay was stopped, the server did not fail."""
    raise NotImplementedError


def compare_all(runs: Sequence[Run], *, metric: str = "violation_rate") -> list[Comparison]:
    """Each policy against `no_sync` and `random_deferral`, where they ran."""
    raise NotImplementedError


def this_machine() -> Machine:
    raise NotImplementedError
