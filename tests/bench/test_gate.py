"""What a trainer costs the vLLM server on the same cores, with each kind of gate: ``make bench-gate``.

A round gives every mode the same arrivals, in slices of a few seconds; within each slice the modes come in random
order, so that whatever else this machine does meets all of them alike. Printed are medians over rounds, and of ratios
within a round (to ``alone``, steps to ``ungated``) the median with the range. ``again`` is alone a second time: its
ratios are what this machine's noise alone amounts to.

``BENCH_GATE='ROUNDS SECONDS LOADS'`` sets the size, such as ``'5 30 4,8,bursts'``: a number is a Poisson rate in
requests/s, ``bursts`` a stretch of a recorded trace (the Azure code trace where ``WADILOCO_AZURE_TRACE`` names it, else
the one that comes with the project) at 4 requests/s on average.

The server is as vLLM ships it and on all cores, as is the trainer. ``BENCH_GATE_CORE=0`` puts both on that core, which
then plays the GPU, and lets the server wait without spinning, as the replay's servers do.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replay.loadgen import PlannedRequest, run_load
from replay.processes import Children, answers, free_ports, wait_for
from replay.traces import read_trace, slice_trace
from replay.vllm_server import AS_SHIPPED, SERVED_NAME, START_DEADLINE_S, LocalVllm, start_vllm
from sidecar.vllm_plugin.gate_reader import ALL_SOURCES
from sidecar.vllm_plugin.identity import default_directory
from sidecar.vllm_plugin.records import SlotFlag
from tests.bench.forecast_series import azure_path

pytestmark = [pytest.mark.bench, pytest.mark.vllm, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
DEFAULT_SIZE = "5 30 4,8,bursts"
CORE = int(os.environ["BENCH_GATE_CORE"]) if "BENCH_GATE_CORE" in os.environ else None
BURSTS = "bursts"
BURSTS_MEAN_PER_S = 4.0
MAX_TOKENS = 32
SLICE_S = 5.0
SETTLE_S = 0.3
"""The trainer has taken up its mode: a few times its way to the next safepoint."""
SLO_FACTOR = 1.5
"""Violations are answers that take longer than so many times the median alone, of the same round."""
MODES = ("alone", "again", "ungated", "ingress", "engine", "scrape")


@dataclass(slots=True)
class Window:
    """One mode in one round."""

    e2e_s: list[float] = field(default_factory=list)
    steps: float = 0.0
    took_s: float = 0.0
    failed: int = 0
    late_s: float = 0.0
    """The most that a request left too late: the load generator's own fault."""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.took_s

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.e2e_s, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Site:
    """A server with middleware and plugin, a gate of its own for a sidecar that only scrapes, and a trainer."""

    url: str
    exact_gate: Path
    scraped_gate: Path
    trainer: subprocess.Popen[str]

    def choose(self, mode: str) -> float:
        """Put the trainer into a mode; returns its steps so far."""
        lines = {
            "alone": "rest",
            "again": "rest",
            "ungated": "run",
            "ingress": f"run {self.exact_gate} {int(ALL_SOURCES)}",
            "engine": f"run {self.exact_gate} {int(SlotFlag.ENGINE)}",
            "scrape": f"run {self.scraped_gate}",
        }
        assert self.trainer.stdin is not None
        assert self.trainer.stdout is not None
        self.trainer.stdin.write(lines[mode] + "\n")
        self.trainer.stdin.flush()
        steps: float = json.loads(self.trainer.stdout.readline())["steps"]
        return steps


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    vllm = LocalVllm(ROOT / os.environ.get("VLLM_VENV", ".venv-vllm"), ROOT / ".local" / "tiny-llama")
    vllm.check()
    children = Children()
    port, sidecar_port = free_ports(2, range(18600, 18700))
    url = f"http://127.0.0.1:{port}"
    exact, scraped = default_directory(port), default_directory(sidecar_port)
    try:
        env = AS_SHIPPED if CORE is None else None
        start_vllm(
            children, vllm, name="vllm", port=port, core=CORE, logs=tmp_path, gate=exact, with_middleware=True, env=env
        )
        asyncio.run(
            wait_for(url, lambda: answers(f"{url}/health"), children=children, deadline_s=START_DEADLINE_S, period_s=1)
        )
        sidecar = [sys.executable, "-m", "wadiloco", "sidecar", "--vllm", url, "--port", str(sidecar_port)]
        children.start("sidecar", [*sidecar, "--gate", str(scraped)], log=tmp_path / "sidecar.log")
        with start_trainer() as trainer:
            yield Site(url, exact, scraped, trainer)
            trainer.kill()
    finally:
        children.stop()
        for gate in (exact, scraped):
            shutil.rmtree(gate, ignore_errors=True)


def start_trainer() -> subprocess.Popen[str]:
    pinned = () if CORE is None else ("taskset", "-c", str(CORE))
    return subprocess.Popen(
        [*pinned, sys.executable, "-m", "tests.bench.gated_trainer"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )


def poisson(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times."""
    rng = random.Random(seed)
    arrivals_s: list[float] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < duration_s:
        arrivals_s.append(at_s)
        at_s += rng.expovariate(rate_per_s)
    return arrivals_s


def recorded(duration_s: float, seed: int) -> list[float]:
    """Arrival times of a stretch of the recorded trace, each round another one."""
    path = azure_path()
    trace = read_trace(path if path.is_file() else ROOT / "replay" / "data" / "bursty.jsonl")
    scale = BURSTS_MEAN_PER_S * trace.duration_s / len(trace.requests)
    # Around one of its requests: a recorded trace has long silences.
    middle_s = random.Random(seed).choice(trace.requests).arrival_s / scale
    start_s = max(0.0, middle_s - duration_s / 2)
    piece = slice_trace(trace, start_s=start_s, duration_s=duration_s, rate_scale=scale)
    return [request.arrival_s for request in piece.requests]


def sliced(arrivals_s: Sequence[float], duration_s: float, seed: int) -> list[list[PlannedRequest]]:
    """Requests of each slice, timed from its beginning."""
    rng = random.Random(seed)
    slices: list[list[PlannedRequest]] = [[] for _ in range(max(1, round(duration_s / SLICE_S)))]
    for at_s in arrivals_s:
        index = min(int(at_s / SLICE_S), len(slices) - 1)
        prompt = tuple(rng.choices(range(3, 251), k=rng.randint(10, 120)))
        slices[index].append(PlannedRequest(at_s - index * SLICE_S, 0, prompt, MAX_TOKENS))
    return slices


async def measure(site: Site, mode: str, requests: Sequence[PlannedRequest], window: Window) -> None:
    """One slice, from its first moment until its last answer."""
    site.choose(mode)
    await asyncio.sleep(SETTLE_S)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    before = site.choose(mode)
    results = await run_load(requests, [site.url], model=SERVED_NAME, timeout_s=60.0)
    await asyncio.sleep(max(0.0, start_s + SLICE_S - loop.time()))
    window.steps += site.choose("alone") - before
    window.took_s += loop.time() - start_s
    good = [result.e2e_s for result in results if result.e2e_s is not None]
    window.e2e_s += good
    window.failed += len(results) - len(good)
    window.late_s = max([window.late_s, *(result.lateness_s for result in results)])


def test_what_training_costs_a_server_with_each_gate(site: Site) -> None:
    rounds, seconds, loads = os.environ.get("BENCH_GATE", DEFAULT_SIZE).split()
    duration_s = float(seconds)
    rng = random.Random(0)
    where = "all of" if CORE is None else f"server and trainer on core {CORE} of"
    print(f"\n{rounds} rounds of {seconds} s per mode in slices of {SLICE_S:g} s, {MAX_TOKENS} tokens per answer, "
          f"{where} {os.cpu_count()} cores")  # fmt: skip
    asyncio.run(measure(site, "ungated", sliced(poisson(4, 5, seed=999), 5, 999)[0], Window()))
    for load in loads.split(","):
        seen: dict[str, list[Window]] = {mode: [] for mode in MODES}
        for number in range(int(rounds)):
            arrivals_s = recorded(duration_s, number) if load == BURSTS else poisson(float(load), duration_s, number)
            windows = {mode: Window() for mode in MODES}
            for requests in sliced(arrivals_s, duration_s, number):
                for mode in rng.sample(MODES, len(MODES)):
                    asyncio.run(measure(site, mode, requests, windows[mode]))
            for mode, window in windows.items():
                seen[mode].append(window)
        report(load, seen)
        assert all(window.failed == 0 for windows in seen.values() for window in windows)
        assert all(window.steps <= 1 for window in seen["alone"])


def report(load: str, seen: dict[str, list[Window]]) -> None:
    requests = sum(len(window.e2e_s) for window in seen["alone"])
    late_ms = 1e3 * max(window.late_s for windows in seen.values() for window in windows)
    unit = "" if load == BURSTS else " requests/s"
    print(f"\n{load}{unit}: {requests} requests per mode; at most {late_ms:.0f} ms late in leaving")
    print(
        f"{'mode':8} {'p50 ms':>7} {'p95 ms':>7} {'p50 / alone':>19} {'p95 / alone':>19} "
        f"{'violations %':>13} {'steps/s':>8} {'steps / ungated':>19}"
    )
    for mode, windows in seen.items():
        alone, ungated = seen["alone"], seen["ungated"]
        thresholds = [SLO_FACTOR * window.percentile(50) for window in alone]
        violated = [
            100 * sum(value > limit for value in window.e2e_s) / len(window.e2e_s)
            for window, limit in zip(windows, thresholds, strict=True)
        ]
        print(
            f"{mode:8} {1e3 * middle([w.percentile(50) for w in windows]):7.0f} "
            f"{1e3 * middle([w.percentile(95) for w in windows]):7.0f} "
            f"{ratios([w.percentile(50) for w in windows], [w.percentile(50) for w in alone]):>19} "
            f"{ratios([w.percentile(95) for w in windows], [w.percentile(95) for w in alone]):>19} "
            f"{middle(violated):13.1f} {middle([w.steps_per_s for w in windows]):8.2f} "
            f"{ratios([w.steps_per_s for w in windows], [w.steps_per_s for w in ungated]):>19}"
        )


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def ratios(values: Sequence[float], reference: Sequence[float]) -> str:
    """Median of the paired ratios, with their range."""
    paired = [value / other for value, other in zip(values, reference, strict=True) if other > 0]
    return f"{middle(paired):.2f} ({min(paired):.2f}-{max(paired):.2f})" if paired else "-"
