"""Statistics of a replay: percentiles, what syncs cost, paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replay.summary import Comparison, Percentiles, Run


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's lifetime and whether it missed the objective. Any common clock."""

    start_s: float
    end_s: float
    violated: bool


def percentiles(values: Sequence[float]) -> Percentiles | None:
    raise NotImplementedError


def sync_excess_rate(outcomes: Sequence[Outcome], windows: Sequence[tuple[float, float]]) -> float | None:
    raise NotImplementedError


def compare(runs: Sequence[Run], *, a: str, b: str, metric: str = "violation_rate", seed: int = 0) -> Comparison | None:
    """Policy ``a`` minus ``b``, paired over the seeds that both ran (mean over draws); None without a common seed."""
    raise NotImplementedError


def gap_closed(
    runs: Sequence[Run], *, random: str = "random_deferral", oracle: str = "oracle"
) -> dict[str, float | None]:
    raise NotImplementedError
