"""What a careful reader must know before believing a table of a replay."""

from __future__ import annotations

from replay.summary import Scaling, Summary

MIN_SEEDS = 5
"""Below this no significance is claimed: even a perfect separation of 4 seeds has p = 0.125."""
SMALL_FACTOR = 0.5


def caveats(summary: Summary) -> list[str]:
    """What a careful reader must know before believing a difference."""
    num_seeds = len({run.seed for run in summary.runs})
    found = []
    if num_seeds < MIN_SEEDS:
        found.append(
            f"{count(num_seeds, 'seed')}: differences between policies are not claimed to be significant "
            f"(that takes {MIN_SEEDS} seeds or more). Read them as one observation."
        )
    num_draws = len({run.draw for run in summary.runs if run.policy == "random_deferral"})
    if num_draws and num_draws < MIN_SEEDS:
        found.append(f"random_deferral had {count(num_draws, 'draw')} per seed; its mean needs {MIN_SEEDS} or more.")
    syncs = {run.outer_syncs for run in summary.runs if run.policy != "no_sync"}
    if len(syncs) > 1:
        found.append(
            f"The runs spent different numbers of outer syncs ({min(syncs)} to {max(syncs)}), so their violation "
            "rates are not a fair comparison of when to sync."
        )
    found += unspent(summary)
    late_ms = max((run.loadgen_late_p99_ms or 0.0 for run in summary.runs), default=0.0)
    limits_ms = [limit for metric, limit in summary.slo.thresholds_ms.items() if metric in {"ttft", "e2e"}]
    if late_ms > min(limits_ms, default=summary.slo.threshold_ms) / 10:
        found.append(
            f"The load generator itself was up to {late_ms:.0f} ms late (p99), over a tenth of the threshold: the "
            "machine was too busy to measure on."
        )
    found += shrunk(summary.scaling) if summary.scaling is not None else []
    if any(run.failed_requests for run in summary.runs):
        found.append("Failed requests count as violations, and their latencies are in no percentile.")
    if any(run.mode == "sim" for run in summary.runs):
        found.append("Simulated runs are estimates from a service model, not measurements.")
    return [*found, "Latencies hold for this machine and this model only; compare policies within one table."]


def unspent(summary: Summary) -> list[str]:
    """Runs whose islands came to fewer syncs than the budget had."""
    budget = summary.budget.outer_syncs
    runs = [run for run in summary.runs if run.policy not in {"no_sync", "no_training"}]
    short = sorted({run.policy for run in runs if budget is not None and run.outer_syncs < budget})
    if not short:
        return []
    least = min(run.outer_syncs for run in runs)
    return [
        f"{', '.join(short)} spent fewer syncs than the budget has (as few as {least} of {budget}): the slice was too "
        "short, or its load left the islands too few inner steps between two syncs. Lower outer_syncs, min_h or the "
        "rate, or lengthen the slice."
    ]


def shrunk(scaling: Scaling) -> list[str]:
    """Lengths that have little to do with those of the trace any more."""
    factors = {"Prompts": scaling.prompt_factor, "Answers": scaling.output_factor}
    return [
        f"{what} were scaled to {factor:.3g} of their length in the trace: its arrivals with smaller requests."
        for what, factor in factors.items()
        if factor < SMALL_FACTOR
    ]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
