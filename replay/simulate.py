"""``wadiloco simulate``: compare policies on a recorded trace in seconds, without a server.

The controller's policies decide on what the sidecars' code makes of the trace, on a virtual clock; a service model with
fixed latencies says which requests a sync harms. `oracle` knows the arrivals: nothing that keeps the budget and the gap
does better, and the share of its advantage over random deferral is what a policy is measured by.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from controller.policy import PolicyContext, make_policy
from controller.policy.base import Policy
from controller.policy_words import in_options
from controller.schema import BudgetSpec
from replay.caveats import caveats
from replay.config import DRAWING_POLICY, policy_spec
from replay.oracle import best_starts
from replay.report import SYNC_EXCESS, render_markdown, render_table
from replay.scaling import scale_lengths
from replay.service_model import Service, ServiceModel, cost_of_starts, serve
from replay.simulate_config import ORACLE, SimulateSettings
from replay.stats import Outcome, gap_closed, percentiles, sync_excess_rate
from replay.summarize import compare_all, slo_spec, this_machine
from replay.summary import Budget, Experiment, Percentiles, Run, Summary, TraceSlice, write_json
from replay.traces import Trace, burstiness, read_trace, slice_trace
from replay.virtual_fleet import Schedule, VirtualFleet, run_policy, steps_between
from replay.virtual_sidecar import Moment, watch
from service.app import package_version
from service.errors import ConfigError, ConflictError, InputError, UnavailableError
from service.files import replace_file
from service.log import configure_logging
from service.settings import load_settings
from sidecar.slo import parse_slo

SUMMARY, REPORT, RUNS = "summary.json", "report.md", "runs"


def main(argv: Sequence[str]) -> int:
    settings = load_settings(SimulateSettings, argv)
    configure_logging("warning" if settings.log_level == "info" else settings.log_level)
    console = Console(stderr=settings.as_json)
    prepare(settings.out)
    summary = simulate(settings, on_stage=lambda stage: console.print(stage, style="dim", highlight=False))
    save(summary, settings.out)
    if settings.as_json:
        sys.stdout.write(summary.model_dump_json(indent=2) + "\n")
        return 0
    console.print(render_table(summary))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in summary.gap_closed.items() if share is not None)
    if shares:
        console.print(f"Share of the way from random_deferral to the oracle: {shares}.", highlight=False)
    console.print(f"Sync excess: {SYNC_EXCESS}.", highlight=False)
    for caveat in caveats(summary):
        console.print(f"- {caveat}", highlight=False)
    console.print(f"\n  {settings.out / SUMMARY}\n  {settings.out / REPORT}", highlight=False)
    return 0


def prepare(out: Path) -> None:
    """Make the directory. What an earlier simulation left there is replaced.

    Raises:
        ConfigError: it cannot be made.
        ConflictError: it holds a replay, whose summary took longer to make.
    """
    if (out / RUNS).exists():
        raise ConflictError(f"{out} holds a replay of real servers", field="out", remedy="choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot write into {out}: {exc.strerror or exc}", field="out", remedy="choose another directory with --out"
        ) from exc


def save(summary: Summary, out: Path) -> None:
    write_json(summary, out / SUMMARY)
    try:
        replace_file(out / REPORT, [render_markdown(summary).encode()])
    except OSError as exc:
        raise UnavailableError(f"cannot write into {out}: {exc.strerror or exc}", field="out") from exc


def simulate(settings: SimulateSettings, *, on_stage: Callable[[str], None] = lambda _: None) -> Summary:
    """Every policy on every seed.

    Raises:
        InputError: the trace cannot be read, a slice of it is empty, or a policy's parameters cannot work.
    """
    for name in settings.policies:
        if name != ORACLE:
            policy_of(name, settings, seed=0, draw=0)
    trace = read_trace(settings.trace, settings.trace_format)
    on_stage(f"forecasting {settings.warm_up_s + settings.seeds * settings.duration_s} s of {trace.name}")
    runs: list[Run] = []
    for seed, stretch in enumerate(stretches(trace, settings)):
        on_stage(f"seed {seed}: {', '.join(settings.policies)}")
        runs += list(run_all(stretch, settings, seed=seed))
    return summarize(settings, trace, runs)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The traffic of one seed, and what the controller would see of it."""

    service: Service
    moments: Sequence[Moment]


def stretches(trace: Trace, settings: SimulateSettings) -> Iterator[Stretch]:
    """A slice per seed. The sidecars watch warm-up and slices in one go."""
    # A seed that begins past the end is refused, as in a replay.
    last_s = settings.start_s + (settings.seeds - 1) * settings.duration_s
    slice_trace(trace, rate_scale=settings.rate_scale, start_s=last_s, duration_s=settings.duration_s)
    length_s = trace.duration_s / settings.rate_scale
    watched_s = settings.warm_up_s + settings.seeds * settings.duration_s
    whole = slice_trace(
        trace,
        rate_scale=settings.rate_scale,
        start_s=(settings.start_s - settings.warm_up_s) % length_s,
        duration_s=watched_s,
    )
    service = serve_trace(whole, settings)
    moments = watch(
        [service.part(slice(index, None, settings.servers)) for index in range(settings.servers)],
        duration_s=watched_s,
        probe_until_s=settings.warm_up_s,
        sync_s=settings.sync_s,
        slo=settings.slo,
        busy_requests=settings.busy_requests,
    )
    deque(islice(moments, settings.warm_up_s), maxlen=0)
    for seed in range(settings.seeds):
        part = service.after(settings.warm_up_s + seed * settings.duration_s)
        yield Stretch(part.part(part.arrival_s < settings.duration_s), tuple(islice(moments, settings.duration_s)))


def fleet_of(settings: SimulateSettings) -> VirtualFleet:
    return VirtualFleet(
        min_h=settings.min_h,
        max_h=settings.max_h,
        step_s=settings.step_ms / 1e3,
        tokens_per_step=settings.tokens_per_step,
        sync_s=settings.sync_s,
        lag_s=settings.lag_s,
        budget=BudgetSpec(
            outer_syncs=settings.outer_syncs, horizon_s=settings.duration_s, min_gap_s=settings.min_gap_s
        ),
    )


def serve_trace(trace: Trace, settings: SimulateSettings) -> Service:
    lengths = scale_lengths([request.output_tokens for request in trace.requests], settings.max_output_tokens).lengths
    arrivals_s = np.array([request.arrival_s for request in trace.requests])
    model = ServiceModel(settings.first_token_ms / 1e3, settings.per_token_ms / 1e3, settings.sync_slowdown)
    return serve(arrivals_s, np.array(lengths), model=model, slo=parse_slo(settings.slo))


def run_all(stretch: Stretch, settings: SimulateSettings, *, seed: int) -> Iterator[Run]:
    """Every policy, and every draw, on one stretch.

    Raises:
        InputError: the stretch has no requests.
    """
    if stretch.service.arrival_s.size == 0:
        raise InputError(
            f"no request lies in the slice of seed {seed}",
            field="--duration-s",
            remedy="lengthen it, or move --start-s",
        )
    for name in settings.policies:
        for draw in range(settings.draws if name == DRAWING_POLICY else 1):
            if name == ORACLE:
                schedule = oracle_schedule(stretch, settings)
            else:
                schedule = run_policy(
                    policy_of(name, settings, seed=seed, draw=draw), fleet_of(settings), stretch.moments
                )
            yield summarize_run(schedule, stretch.service, settings, policy=name, seed=seed, draw=draw)


def policy_of(name: str, settings: SimulateSettings, *, seed: int, draw: int) -> Policy:
    context = PolicyContext(min_h=settings.min_h, max_h=settings.max_h, seed=seed)
    try:
        return make_policy(policy_spec(name, settings.policy_params, seed=seed, draw=draw), context)
    except InputError as exc:
        raise in_options(exc) from exc


def oracle_schedule(stretch: Stretch, settings: SimulateSettings) -> Schedule:
    """The best decisions at whole seconds, within the limits that hold for every policy."""
    first = math.ceil(settings.min_h * settings.step_ms / 1e3)
    last = math.floor(settings.duration_s - settings.lag_s - settings.sync_s)
    starts_s = np.arange(first, last + 1, dtype=np.float64) + settings.lag_s
    costs = cost_of_starts(stretch.service, starts_s, sync_s=settings.sync_s)
    chosen = best_starts(costs.tolist(), num_syncs=settings.outer_syncs, gap=math.ceil(settings.gap_s))
    return Schedule(tuple((float(starts_s[i]), float(starts_s[i]) + settings.sync_s) for i in chosen))


def summarize_run(
    schedule: Schedule, service: Service, settings: SimulateSettings, *, policy: str, seed: int, draw: int
) -> Run:
    met = service.in_sync(schedule.windows)
    violated = service.violated(schedule.windows)
    slow = np.where(met, service.slow, 1.0)
    outcomes = [
        Outcome(*row) for row in zip(service.arrival_s.tolist(), service.end_s.tolist(), violated.tolist(), strict=True)
    ]
    steps = steps_between(fleet_of(settings), schedule.busy_s, settings.duration_s) * settings.servers
    return Run(
        policy=policy,
        seed=seed,
        draw=draw,
        mode="sim",
        requests=service.arrival_s.size,
        violations=int(violated.sum()),
        violation_rate=float(violated.mean()),
        sync_excess_rate=sync_excess_rate(outcomes, schedule.windows),
        ttft_ms=_percentiles_ms(slow * service.ttft_s),
        itl_ms=_percentiles_ms(slow * service.itl_s),
        e2e_ms=_percentiles_ms(slow * service.e2e_s),
        outer_syncs=len(schedule.windows),
        sync_busy_s=schedule.busy_s * settings.servers,
        tokens_trained=steps * settings.tokens_per_step,
        inner_steps=steps,
        final_loss=None,
        loadgen_late_p99_ms=None,
    )


def summarize(settings: SimulateSettings, trace: Trace, runs: list[Run]) -> Summary:
    slo = parse_slo(settings.slo)
    first = slice_trace(trace, rate_scale=settings.rate_scale, start_s=settings.start_s, duration_s=settings.duration_s)
    shape = burstiness(first)
    return Summary(
        trace=trace.name,
        slo=slo_spec(slo),
        budget=Budget(outer_syncs=settings.outer_syncs, min_gap_s=settings.min_gap_s),
        runs=runs,
        comparisons=compare_all(runs),
        gap_closed=gap_closed(runs),
        slice=TraceSlice(
            format=trace.format,
            rate_scale=settings.rate_scale,
            start_s=settings.start_s,
            duration_s=settings.duration_s,
            **asdict(shape),
        ),
        machine=this_machine(),
        experiment=Experiment(
            wadiloco_version=package_version(),
            command=shlex.join(["wadiloco", *sys.argv[1:]]),
            settings=settings.model_dump(mode="json"),
            servers=[],
            islands=settings.servers,
        ),
        generated_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _percentiles_ms(values_s: np.ndarray[Any, np.dtype[np.float64]]) -> Percentiles | None:
    return percentiles((values_s * 1e3).tolist())
