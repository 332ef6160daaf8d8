"""From raw results to the parts of ``summary.json``."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from replay.loadgen import RequestResult, Status
from replay.slo import violates
from replay.stats import Outcome, compare, percentiles, sync_excess_rate
from replay.summary import Comparison, Machine, Run, SloSpec
from replay.timeline import SyncWindow
from sidecar.slo import Slo

COMPARED_WITH = ("no_sync", "random_deferral")
"""What any claim about a policy is measured against: no training syncs at all, and as many at random times."""
MAX_ERRORS = 5
"""Distinct failure messages kept per run: enough to see the cause, short enough to read."""


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
    """One row of the table. Cancelled requests do not count: the replay was stopped, the server did not fail.

    Raises:
        ValueError: not one request counts, so there is no rate.
    """
    counted = [result for result in results if result.status is not Status.CANCELLED]
    if not counted:
        raise ValueError(f"no request of run {policy} seed {seed} draw {draw} has ended")
    outcomes = [Outcome(result.sent_s, result.ended_s, violates(result, slo)) for result in counted]
    violations = sum(outcome.violated for outcome in outcomes)
    answered = [result for result in counted if result.ok]
    failed = [result for result in counted if not result.ok]
    return Run(
        policy=policy,
        seed=seed,
        draw=draw,
        mode=mode,
        requests=len(counted),
        violations=violations,
        violation_rate=violations / len(counted),
        sync_excess_rate=sync_excess_rate(outcomes, [(sync.start_s, sync.end_s) for sync in training.sync_windows]),
        ttft_ms=percentiles([result.ttft_s * 1e3 for result in answered if result.ttft_s is not None]),
        itl_ms=percentiles([gap_s * 1e3 for result in answered for gap_s in result.itl_s]),
        e2e_ms=percentiles([result.e2e_s * 1e3 for result in answered if result.e2e_s is not None]),
        outer_syncs=training.outer_syncs,
        sync_busy_s=sum(sync.end_s - sync.start_s for sync in training.sync_windows),
        tokens_trained=training.tokens_trained,
        first_loss=training.first_loss,
        final_loss=training.final_loss,
        inner_steps=training.inner_steps,
        loadgen_late_p99_ms=_late_p99_ms(counted),
        failed_requests=dict(Counter(result.status.value for result in failed)),
        errors=[*errors, *_common_details(failed)],
        started_unix_s=started_unix_s,
        notes=list(notes),
    )


def compare_all(runs: Sequence[Run], *, metric: str = "violation_rate") -> list[Comparison]:
    """Each policy against `no_sync` and `random_deferral`, where they ran on a common seed."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    pairs = [(a, b) for b in COMPARED_WITH for a in policies if b in policies and a not in {b, "no_sync"}]
    found = (compare(runs, a=a, b=b, metric=metric) for a, b in pairs)
    return [comparison for comparison in found if comparison is not None]


def slo_spec(slo: Slo) -> SloSpec:
    return SloSpec(
        metric=slo.main.metric.value,
        threshold_ms=slo.main.threshold_s * 1e3,
        objectives_ms={one.metric.value: one.threshold_s * 1e3 for one in slo.objectives},
        target_frac=slo.target_frac,
    )


def this_machine() -> Machine:
    """What the figures were measured on."""
    return Machine(
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_model=_cpu_model(),
        memory_bytes=_memory_bytes(),
        platform=platform.platform(),
        python=platform.python_version(),
    )


def _late_p99_ms(results: Sequence[RequestResult]) -> float | None:
    late = percentiles([result.lateness_s * 1e3 for result in results])
    return None if late is None else late.p99


def _common_details(failed: Sequence[RequestResult]) -> list[str]:
    counts = Counter(f"{result.status}: {result.detail}" for result in failed)
    return [f"{number} x {detail}" for detail, number in counts.most_common(MAX_ERRORS)]


def _cpu_model() -> str | None:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
