"""The report of a replay for people: Markdown, and the same table for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from replay.caveats import MIN_SEEDS, caveats, count
from replay.stats import metric_value
from replay.summary import Comparison, Experiment, Run, Summary

ALPHA = 0.05
INTERVAL_NOTE = (
    "Differences are paired over seeds; p is that of the exact sign-flip test, and the reading follows it alone. The "
    "interval is a percentile bootstrap, which is too narrow with few seeds (it covers about 84 % with 5, 89 % with 8)."
)
SYNC_EXCESS = (
    "share of all requests that violated the objective beyond the rate among requests that met no sync (negative: "
    "those that met one did better, by chance or because syncs were placed well)"
)
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cell: Callable[[Sequence[Run]], str]
    short: str | None = None
    """Title in a terminal, where only the columns that have one fit into 80 characters."""


def render_markdown(summary: Summary) -> str:
    """``report.md``."""
    sections = [
        f"# Replay of {summary.trace}",
        _setting(summary),
        "## Policies",
        _markdown_table([column.title for column in COLUMNS], table_rows(summary, COLUMNS)),
        _legend(summary),
        "## Comparisons",
        _comparisons(summary),
        _gap(summary),
        _picture(summary),
        "## What was replayed",
        _replayed(summary),
        "## How far this carries",
        _bullets(caveats(summary)),
        _problems(summary),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def render_table(summary: Summary) -> Table:
    """The table per policy for a terminal."""
    columns = [column for column in COLUMNS if column.short is not None]
    num_failed = sum(sum(run.failed_requests.values()) for run in summary.runs)
    table = Table(
        title=f"{summary.trace}: SLO {_slo(summary)}",
        caption=f"{count(num_failed, 'request')} failed (counted as violations)" if num_failed else None,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, column in enumerate(columns):
        table.add_column(column.short or column.title, justify="right" if number else "left", no_wrap=number == 0)
    for row in table_rows(summary, columns):
        table.add_row(*row)
    return table


def table_rows(summary: Summary, columns: Sequence[Column]) -> list[list[str]]:
    """One row per policy, in the order in which they first ran."""
    by_policy: dict[str, list[Run]] = {}
    for run in summary.runs:
        by_policy.setdefault(run.policy, []).append(run)
    return [[column.cell(runs) for column in columns] for runs in by_policy.values()]


def _setting(summary: Summary) -> str:
    budget = summary.budget
    syncs = "no limit" if budget.outer_syncs is None else count(budget.outer_syncs, "outer sync")
    lines = [f"SLO: {_slo(summary)}."]
    if any(run.policy not in {"no_sync", "no_training"} for run in summary.runs):
        lines.append(f"Sync budget: {syncs}, at least {budget.min_gap_s:g} s apart.")
    if summary.generated_at:
        lines.append(f"Made {summary.generated_at}.")
    return " ".join(lines)


def _legend(summary: Summary) -> str:
    return (
        "Where a policy ran several times, figures are means over its runs (of the runs' percentiles too), with the "
        "lowest and highest in brackets; requests and failures are sums. "
        f"Violations are requests that missed {_any_of(summary)}, and failed ones. Latencies count from the "
        "moment at which a request was sent; *late* is how long after its planned time that was (p99, worst run). "
        "*ITL*: gaps between the arrivals of tokens at the client, 0 where several came in one read. *Sync excess*: "
        f"{SYNC_EXCESS}. *In sync*: seconds in outer syncs, added over the islands. *Inner steps*, *tokens trained*: "
        "of all islands within the slice. *Loss*: training loss, mean over the islands, at the start and at the end."
    )


def _comparisons(summary: Summary) -> str:
    if not summary.comparisons:
        return "None: neither no_sync nor random_deferral ran on a common seed with another policy."
    titles = ["policy", "against", "metric", "mean difference", "95 % interval", "p", "seeds", "reading"]
    table = _markdown_table(titles, [_comparison_row(comparison) for comparison in summary.comparisons])
    return f"{table}\n\n{INTERVAL_NOTE if any(found.n > 1 for found in summary.comparisons) else ''}".rstrip()


def _comparison_row(found: Comparison) -> list[str]:
    is_share = found.metric.endswith("_rate")
    show = _points if is_share else _signed
    interval = UNKNOWN if found.ci95 is None else f"{show(found.ci95[0])} to {show(found.ci95[1])}"
    p_value = UNKNOWN if found.p_value is None else f"{found.p_value:.3g}"
    return [found.a, found.b, found.metric, show(found.mean_diff), interval, p_value, str(found.n), reading(found)]


def reading(found: Comparison) -> str:
    """A comparison in words, never stronger than its data."""
    if found.n < MIN_SEEDS or found.p_value is None:
        return "too few seeds to tell"
    if found.p_value >= ALPHA:
        return "no difference shown"
    return f"{found.a} is {'lower' if found.mean_diff < 0 else 'higher'}"


def _gap(summary: Summary) -> str:
    known = {policy: share for policy, share in summary.gap_closed.items() if share is not None}
    if not known:
        return ""
    shares = ", ".join(f"{policy} {share:.0%}" for policy, share in known.items())
    return f"Share of the way from random_deferral to the oracle: {shares}."


def _picture(summary: Summary) -> str:
    return f"![Load, training, syncs and violations over time]({summary.timeline})" if summary.timeline else ""


def _replayed(summary: Summary) -> str:
    lines = []
    if summary.slice is not None:
        part = summary.slice
        lines.append(
            f"Slice: {part.duration_s:g} s from {part.start_s:g} s of {summary.trace} ({part.format}) at "
            f"{part.rate_scale:g} times its rate: {count(part.num_requests, 'request')}, mean "
            f"{part.mean_rate_per_s:.2f}/s, peak {part.peak_rate_per_s:.0f}/s, variance/mean of the counts per second "
            f"{part.variance_to_mean:.1f} (1 is Poisson), {part.empty_frac:.0%} of the seconds empty."
        )
    if summary.scaling is not None:
        scaling = summary.scaling
        lines.append(
            f"Lengths: prompts times {scaling.prompt_factor:.3g}, at most {scaling.max_prompt_tokens} tokens "
            f"({scaling.prompt_clipped_frac:.1%} cut), mean {scaling.prompt_tokens_mean:.0f}; answers times "
            f"{scaling.output_factor:.3g}, at most {scaling.max_output_tokens} tokens "
            f"({scaling.output_clipped_frac:.1%} cut), mean {scaling.output_tokens_mean:.0f}. Prompts are random "
            "tokens, different in each request, so that no prefix cache helps."
        )
    if summary.experiment is not None:
        lines += _experiment(summary.experiment)
    if summary.machine is not None:
        lines.append(f"Machine: {_machine(summary)}.")
    return _bullets(lines)


def _experiment(experiment: Experiment) -> list[str]:
    servers = "; ".join(
        f"{server.url} serves {server.model} ({server.max_model_len} tokens of context, "
        f"vLLM {server.vllm_version or 'of unknown version'}), {count(server.requests, 'request')}"
        for server in experiment.servers
    )
    return [
        f"Servers: {servers or 'simulated'}. {count(experiment.islands, 'training island')}.",
        f"Command (wadiloco {experiment.wadiloco_version}): `{experiment.command}`. All settings are in summary.json.",
    ]


def _machine(summary: Summary) -> str:
    machine = summary.machine
    assert machine is not None
    parts = [count(machine.cpu_count, "CPU core")]
    if machine.cpu_model:
        parts[0] += f" ({machine.cpu_model})"
    if machine.memory_bytes:
        parts.append(f"{machine.memory_bytes / 2**30:.0f} GiB memory")
    return ", ".join([*parts, machine.platform, f"Python {machine.python}"])


def _problems(summary: Summary) -> str:
    lines = [f"{run.policy}, seed {run.seed}, draw {run.draw}: {text}" for run in summary.runs for text in run.errors]
    notes = [f"{run.policy}, seed {run.seed}, draw {run.draw}: {text}" for run in summary.runs for text in run.notes]
    found = [*lines, *notes, *summary.notes]
    return "## Errors and notes\n\n" + _bullets(found) if found else ""


def _slo(summary: Summary) -> str:
    return ", ".join(f"{metric} at most {limit_ms:g} ms" for metric, limit_ms in summary.slo.thresholds_ms.items())


def _any_of(summary: Summary) -> str:
    return "any of the objectives" if len(summary.slo.thresholds_ms) > 1 else "the objective"


def _markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = [":---", *("---:" for _ in titles[1:])]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in (titles, rule, *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _points(share: float) -> str:
    return f"{share * 100:+.2f} points"


def _signed(value: float) -> str:
    return f"{value:+.3g}"


def _mean(runs: Sequence[Run], metric: str) -> float | None:
    values = [value for run in runs if (value := metric_value(run, metric)) is not None]
    return sum(values) / len(values) if values else None


def _total(metric: str) -> Callable[[Sequence[Run]], str]:
    return lambda runs: f"{sum(metric_value(run, metric) or 0 for run in runs):,.0f}"


def _average(metric: str, form: str) -> Callable[[Sequence[Run]], str]:
    return lambda runs: UNKNOWN if (value := _mean(runs, metric)) is None else format(value, form)


def _latency(metric: str) -> Callable[[Sequence[Run]], str]:
    p50, p95 = _average(f"{metric}.p50", ".0f"), _average(f"{metric}.p95", ".0f")
    return lambda runs: f"{p50(runs)}/{p95(runs)}"


def _violation_rate(runs: Sequence[Run]) -> str:
    rates = [run.violation_rate for run in runs]
    spread = f" ({min(rates):.1%} to {max(rates):.1%})" if len(rates) > 1 else ""
    return f"{sum(rates) / len(rates):.1%}{spread}"


def _loss(runs: Sequence[Run]) -> str:
    first, final = _mean(runs, "first_loss"), _mean(runs, "final_loss")
    if final is None:
        return UNKNOWN
    return f"{final:.2f}" if first is None else f"{first:.2f}→{final:.2f}"


def _late(runs: Sequence[Run]) -> str:
    known = [run.loadgen_late_p99_ms for run in runs if run.loadgen_late_p99_ms is not None]
    return f"{max(known):.1f}" if known else UNKNOWN


COLUMNS = (
    Column("policy", lambda runs: runs[0].policy, short="policy"),
    Column("runs", lambda runs: str(len(runs))),
    Column("requests", _total("requests"), short="requests"),
    Column("violations", _violation_rate, short="violated"),
    Column("sync excess", _average("sync_excess_rate", ".1%"), short="sync\nexcess"),
    Column("TTFT p50/p95 ms", _latency("ttft_ms")),
    Column("ITL p50/p95 ms", _latency("itl_ms")),
    Column("e2e p50/p95 ms", _latency("e2e_ms"), short="e2e ms\np50/p95"),
    Column("failed", lambda runs: f"{sum(sum(run.failed_requests.values()) for run in runs):,}"),
    Column("outer syncs", _average("outer_syncs", ".3g"), short="outer\nsyncs"),
    Column("in sync s", _average("sync_busy_s", ".1f")),
    Column("inner steps", _average("inner_steps", ",.0f"), short="inner\nsteps"),
    Column("tokens trained", _average("tokens_trained", ",.0f")),
    Column("loss", _loss, short="loss"),
    Column("late ms", _late),
)
