"""Statistics of a replay (pure).

**Sync excess.** A request *meets* a sync when their times overlap. With r the violation rate of the requests that meet
none, the syncs are charged with what exceeds r: excess = (violations among the m that meet one - r m) / all requests.
It can be negative by chance. Long requests meet syncs more often and violate more often anyway, so it errs upwards.

**Paired test and interval** are those of `service.statistics`: the unit is the seed, the difference that of two
policies (each the mean over its draws).
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replay.summary import Comparison, Percentiles, Run
from service.statistics import bootstrap_ci95, sign_flip_p_value

REFERENCES = frozenset({"no_sync", "random_deferral", "oracle"})
"""Policies that define the gap, so that a share of it says nothing about them."""
SMALLEST_GAP = 1e-9


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's lifetime and whether it missed the objective. Any common clock."""

    start_s: float
    end_s: float
    violated: bool


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """p50, p95 and p99 (linear interpolation); None without values."""
    if not values:
        return None
    p50, p95, p99 = np.percentile(np.asarray(values, dtype=float), (50, 95, 99))
    return Percentiles(p50=float(p50), p95=float(p95), p99=float(p99))


def sync_excess_rate(outcomes: Sequence[Outcome], windows: Sequence[tuple[float, float]]) -> float | None:
    """Share of all requests that violated the objective because of syncs; None if every request met one."""
    if not windows:
        return 0.0 if outcomes else None
    merged = _merge(windows)
    during = [outcome.violated for outcome in outcomes if _overlaps(outcome, merged)]
    num_other = len(outcomes) - len(during)
    if num_other == 0:
        return None
    violations_other = sum(outcome.violated for outcome in outcomes) - sum(during)
    return (sum(during) - violations_other / num_other * len(during)) / len(outcomes)


def compare(runs: Sequence[Run], *, a: str, b: str, metric: str = "violation_rate", seed: int = 0) -> Comparison | None:
    """Policy ``a`` minus ``b``, paired over the seeds that both ran (mean over draws); None without a common seed."""
    by_seed_a, by_seed_b = mean_by_seed(runs, a, metric), mean_by_seed(runs, b, metric)
    differences = [by_seed_a[number] - by_seed_b[number] for number in sorted(by_seed_a.keys() & by_seed_b.keys())]
    if not differences:
        return None
    return Comparison(
        a=a,
        b=b,
        metric=metric,
        mean_diff=sum(differences) / len(differences),
        ci95=bootstrap_ci95(differences, seed=seed) if len(differences) > 1 else None,
        p_value=sign_flip_p_value(differences, seed=seed) if len(differences) > 1 else None,
        n=len(differences),
    )


def gap_closed(
    runs: Sequence[Run], *, random: str = "random_deferral", oracle: str = "oracle"
) -> dict[str, float | None]:
    """Policy → (random - policy) / (random - oracle) of the violation rates over common seeds; None if unknown."""
    policies = sorted({run.policy for run in runs} - REFERENCES - {random, oracle})
    return {policy: _share_of_gap(runs, policy, random, oracle) for policy in policies}


def mean_by_seed(runs: Sequence[Run], policy: str, metric: str) -> dict[int, float]:
    """Seed → mean of ``metric`` over the draws of ``policy``; draws where it is unknown are left out.

    ``metric`` is a field of `Run`, or a percentile such as ``e2e_ms.p95``.
    """
    values: defaultdict[int, list[float]] = defaultdict(list)
    for run in runs:
        value = metric_value(run, metric) if run.policy == policy else None
        if value is not None:
            values[run.seed].append(value)
    return {number: sum(group) / len(group) for number, group in values.items()}


def metric_value(run: Run, metric: str) -> float | None:
    name, _, percentile = metric.partition(".")
    value = getattr(run, name)
    if percentile and value is not None:
        value = getattr(value, percentile)
    return None if value is None else float(value)


def _share_of_gap(runs: Sequence[Run], policy: str, random: str, oracle: str) -> float | None:
    rates: Mapping[str, dict[int, float]] = {
        name: mean_by_seed(runs, name, "violation_rate") for name in (policy, random, oracle)
    }
    seeds = set.intersection(*(set(by_seed) for by_seed in rates.values()))
    if not seeds:
        return None
    mean = {name: sum(by_seed[number] for number in seeds) / len(seeds) for name, by_seed in rates.items()}
    gap = mean[random] - mean[oracle]
    # An oracle no better than random leaves nothing to close; a share of a negative gap would turn its meaning round.
    return None if gap < SMALLEST_GAP else (mean[random] - mean[policy]) / gap


def _merge(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(windows):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((start_s, end_s))
    return merged


def _overlaps(outcome: Outcome, merged: Sequence[tuple[float, float]]) -> bool:
    # The last window that begins before the request ends is the only one that can still reach it.
    position = bisect.bisect_right(merged, (outcome.end_s, math.inf)) - 1
    return position >= 0 and merged[position][1] >= outcome.start_s
