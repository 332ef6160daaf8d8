"""What each policy's choice of moments is worth, against matched random deferral: ``make bench-policy``.

Every policy spends the same budget on the same stretches of a trace (`replay.simulate`). A request takes 50 ms and
violates exactly when it overlaps a sync, so that violations count the arrivals that a sync met. Printed per policy are
violations per stretch, the share of the way from random deferral (the mean of 25 draws) to the oracle, the difference
to random deferral in violations per stretch with a 95 % bootstrap interval, and the p of the paired sign-flip test.

The pair is the stretch, not the seed of the generator: five seeds could give no p under 0.06. A generated trace has
5 seeds of 6 stretches each, 10 minutes after a warm-up of 20; the Azure trace, 57 minutes, has 9 stretches of 5 minutes
after a warm-up of 10; the bundled one, ten minutes, has 5 of 2 minutes and all of it as the warm-up. Stretches do not
overlap, and every stretch has its own budget. Headroom is the oracle's advantage: 1 - oracle / random.

The oracle knows arrivals that nothing foretells. In the process of the bundled trace bursts come without a warning, at
a constant hazard; who knows all of the past knows at best whether a burst is on, and a sync that starts in a lull still
meets, with lull and burst lengths L and B and rates l and b,

    ∫ l + (b - l) B / (B + L) (1 - exp(-(1/B + 1/L) s)) ds        over its seconds s from now

requests. Between periodic bursts the lull's own requests are all that a policy must meet. The share of the gap that
this leaves to any policy is printed too; on `bursty` the target is a share of it.

`steady` is Poisson, and no policy can be better or worse than another: it has twice the stretches, and what is shown
there is the noise of this bench.

    WADILOCO_AZURE_TRACE=FILE    the Azure code trace
    BENCH_POLICY='SYNC_S LAG_S'  by default 2 and 0.5, for which the targets are
    BENCH_POLICY_TRACE=FILE      another trace in place of all
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from replay.make_trace import BURST, LULL, make_requests
from replay.simulate import run_all, stretches
from replay.simulate_config import SimulateSettings
from replay.stats import compare, gap_closed, mean_by_seed
from replay.summary import Run
from replay.traces import Request, Trace, read_trace
from tests.bench.forecast_series import azure_path

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

SEEDS = range(201, 206)
STRETCH_S, STRETCHES, WARM_UP_S = 600, 6, 1200
PER_600_S = 8
GAP_S = 20.0
POLICIES = ("fixed_h", "adaptive_tokens", "pressure_gate", "wa_diloco", "wa_calibrated", "wa_forecast")
STEP_MS = 200.0
PERIOD_S, BURST_S = 120, 30
MIN_SHARE, MAX_P = 0.85, 0.01


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    traces: tuple[Trace, ...]
    stretch_s: int = STRETCH_S
    stretches: int = STRETCHES
    warm_up_s: int = WARM_UP_S
    start_s: float = float(WARM_UP_S)


def bursty(seed: int, duration_s: float) -> Iterator[Request]:
    """The process of the bundled trace."""
    return make_requests(seed, duration_s=duration_s)


def periodic(seed: int, duration_s: float) -> Iterator[Request]:
    """Every two minutes half a minute of 10 requests/s, else 0.4/s."""
    return poisson(seed, duration_s, lambda now_s: (BURST if now_s % PERIOD_S < BURST_S else LULL).rate_per_s)


def steady(seed: int, duration_s: float) -> Iterator[Request]:
    """Poisson, 4 requests/s."""
    return poisson(seed, duration_s, lambda now_s: 4.0)


def poisson(seed: int, duration_s: float, rate_per_s: Callable[[float], float]) -> Iterator[Request]:
    """Thinned from the highest rate."""
    rng = np.random.default_rng(seed)
    top = 10.0
    now_s = float(rng.exponential(1 / top))
    while now_s < duration_s:
        if rng.random() * top < rate_per_s(now_s):
            yield Request(now_s, 10, 1)
        now_s += float(rng.exponential(1 / top))


def generated(name: str, make: Callable[[int, float], Iterator[Request]], *, num: int = STRETCHES) -> Kind:
    duration_s = float(WARM_UP_S + STRETCH_S * num)
    traces = (Trace(name, "made", tuple(make(seed, duration_s)), duration_s) for seed in SEEDS)
    return Kind(name, tuple(traces), stretches=num)


def recorded(path: Path) -> Kind:
    """As many stretches of five minutes as it has after ten minutes of warm-up; a short one goes round."""
    trace = read_trace(path)
    if trace.duration_s < 1800:
        return Kind(path.name, (trace,), int(trace.duration_s // 5), 5, int(trace.duration_s), 0.0)
    return Kind(path.name, (trace,), 300, int((trace.duration_s - 600) // 300), 600, 600.0)


def kinds() -> dict[str, Callable[[], Kind]]:
    chosen = os.environ.get("BENCH_POLICY_TRACE")
    if chosen:
        return {chosen: lambda: recorded(Path(chosen))}
    found: dict[str, Callable[[], Kind]] = {
        "bursty": lambda: generated("bursty", bursty),
        "periodic": lambda: generated("periodic", periodic),
        "steady": lambda: generated("steady", steady, num=2 * STRETCHES),
        "bursty.jsonl": lambda: recorded(SimulateSettings().trace),
    }
    if azure_path().is_file():
        found["azure"] = lambda: recorded(azure_path())
    return found


KINDS = kinds()
TARGETS = frozenset({"bursty", "periodic", "azure"})
NO_HEADROOM = frozenset({"steady"})


def limit(name: str, settings: SimulateSettings) -> float | None:
    """Share of the gap that a policy can close when it knows whether a burst is on (see the text)."""
    if name == "periodic":
        mean_per_s = (BURST_S * BURST.rate_per_s + (PERIOD_S - BURST_S) * LULL.rate_per_s) / PERIOD_S
        return 1 - LULL.rate_per_s / mean_per_s
    return limit_of_bursty(settings) if name == "bursty" else None


def limit_of_bursty(settings: SimulateSettings) -> float:
    busy_frac = BURST.mean_length_s / (BURST.mean_length_s + LULL.mean_length_s)
    mean_per_s = busy_frac * BURST.rate_per_s + (1 - busy_frac) * LULL.rate_per_s
    ahead_s = settings.lag_s + np.linspace(0.0, settings.sync_s, 1001)
    begun = busy_frac * (1 - np.exp(-(1 / BURST.mean_length_s + 1 / LULL.mean_length_s) * ahead_s))
    met_per_s = float(np.mean(LULL.rate_per_s + (BURST.rate_per_s - LULL.rate_per_s) * begun))
    return 1 - met_per_s / mean_per_s


def settings_of(kind: Kind) -> SimulateSettings:
    sync_s, lag_s = (float(part) for part in os.environ.get("BENCH_POLICY", "2 0.5").split())
    syncs = max(2, round(PER_600_S * kind.stretch_s / 600))
    return SimulateSettings(
        start_s=kind.start_s,
        duration_s=kind.stretch_s,
        warm_up_s=kind.warm_up_s,
        seeds=kind.stretches,
        draws=25,
        policies=("random_deferral", *POLICIES, "oracle"),
        # As many steps as fit between two syncs at an even pace.
        policy_params={"fixed_h.h": kind.stretch_s * 1000 // int(STEP_MS * (syncs + 1))},
        slo="e2e:200ms",
        first_token_ms=50,
        per_token_ms=0,
        sync_slowdown=10,
        sync_s=sync_s,
        lag_s=lag_s,
        step_ms=STEP_MS,
        outer_syncs=syncs,
        min_gap_s=GAP_S,
    )


@pytest.mark.parametrize("name", KINDS)
def test_policies_against_matched_random_deferral(name: str) -> None:
    kind = KINDS[name]()
    settings = settings_of(kind)
    began_s = time.perf_counter()
    runs: list[Run] = []
    for index, trace in enumerate(kind.traces):
        for number, stretch in enumerate(stretches(trace, settings)):
            runs += run_all(stretch, settings, seed=index * kind.stretches + number)
    show(name, settings, runs, took_s=time.perf_counter() - began_s)
    spent = {run.outer_syncs for run in runs}
    assert spent == {settings.outer_syncs}
    found = compare(runs, a="wa_forecast", b="random_deferral", metric="violations")
    assert found is not None
    assert found.ci95 is not None
    assert found.p_value is not None
    share = gap_closed(runs)["wa_forecast"]
    if name in NO_HEADROOM:
        assert found.ci95[0] <= 0
    elif name in TARGETS and "BENCH_POLICY" not in os.environ:
        assert found.mean_diff < 0
        assert found.p_value < MAX_P
        assert share is not None
        assert share >= MIN_SHARE * (limit_of_bursty(settings) if name == "bursty" else 1.0)


def show(name: str, settings: SimulateSettings, runs: list[Run], *, took_s: float) -> None:
    shares = gap_closed(runs)
    means = {
        policy: float(np.mean(list(mean_by_seed(runs, policy, "violations").values()))) for policy in settings.policies
    }
    num = len({run.seed for run in runs})
    reachable = limit(name, settings)
    print(
        f"\n{name}: {num} stretches of {settings.duration_s} s, {settings.outer_syncs} syncs of {settings.sync_s:g} s "
        f"each, lag {settings.lag_s:g} s; headroom {1 - means['oracle'] / means['random_deferral']:.0%}"
        + ("" if reachable is None else f", of which a policy can close {reachable:.0%}")
        + f"; {took_s:.0f} s"
    )
    print(f"{'policy':16} {'violations':>10} {'gap closed':>10} {'difference, 95 % interval':>30} {'p':>8}")
    for policy in settings.policies:
        found = compare(runs, a=policy, b="random_deferral", metric="violations")
        assert found is not None
        interval = (
            "" if found.ci95 is None else f"{found.mean_diff:+.2f} ({found.ci95[0]:+.2f} to {found.ci95[1]:+.2f})"
        )
        share = shares.get(policy)
        p_value = "" if policy == "random_deferral" or found.p_value is None else f"{found.p_value:.2g}"
        print(
            f"{policy:16} {means[policy]:10.2f} {'' if share is None else f'{share:.1%}':>10} "
            f"{'' if policy == 'random_deferral' else interval:>30} {p_value:>8}"
        )
