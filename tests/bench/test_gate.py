"""What a trainer costs the vLLM server on the same cores, with each kind of gate: ``make bench-gate``.

Rounds of every mode, interleaved in random order, each against the same Poisson arrivals of 32-token answers. Printed
are medians over rounds, and of ratios within a round (to ``alone``, steps to ``ungated``) the median with the range.
``BENCH_GATE='ROUNDS SECONDS RATES'`` sets the size, such as ``'5 30 4,8'``.
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
from dataclasses import dataclass
from pathlib import Path

import pytest

from replay.loadgen import PlannedRequest, run_load
from replay.processes import Children, answers, free_ports, wait_for
from replay.vllm_server import SERVED_NAME, START_DEADLINE_S, LocalVllm, start_vllm
from sidecar.vllm_plugin.gate_reader import ALL_SOURCES
from sidecar.vllm_plugin.identity import default_directory
from sidecar.vllm_plugin.records import SlotFlag

pytestmark = [pytest.mark.bench, pytest.mark.vllm, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
DEFAULT_SIZE = "5 30 4,8"
MAX_TOKENS = 32
SETTLE_S = 2.0
"""The trainer has taken up its mode, and the load generator is ready."""
SLO_FACTOR = 1.5
"""Violations are answers that take longer than so many times the median alone, of the same round."""
MODES = ("alone", "ungated", "ingress", "engine", "scrape")


@dataclass(frozen=True, slots=True)
class Window:
    """One mode for some seconds."""

    e2e_s: tuple[float, ...]
    steps_per_s: float
    failed: int

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.e2e_s, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Site:
    """A server with middleware and plugin, a gate of its own for a sidecar that only scrapes, and a trainer."""

    url: str
    exact_gate: Path
    scraped_gate: Path
    trainer: subprocess.Popen[str]

    def choose(self, mode: str) -> int:
        """Put the trainer into a mode; returns its steps so far."""
        lines = {
            "alone": "rest",
            "ungated": "run",
            "ingress": f"run {self.exact_gate} {int(ALL_SOURCES)}",
            "engine": f"run {self.exact_gate} {int(SlotFlag.ENGINE)}",
            "scrape": f"run {self.scraped_gate}",
        }
        assert self.trainer.stdin is not None
        assert self.trainer.stdout is not None
        self.trainer.stdin.write(lines[mode] + "\n")
        self.trainer.stdin.flush()
        steps: int = json.loads(self.trainer.stdout.readline())["steps"]
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
        start_vllm(children, vllm, name="vllm", port=port, core=None, logs=tmp_path, gate=exact, with_middleware=True)
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
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench.gated_trainer"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )


def poisson(rate_per_s: float, duration_s: float, seed: int) -> list[PlannedRequest]:
    rng = random.Random(seed)
    planned: list[PlannedRequest] = []
    arrival_s = rng.expovariate(rate_per_s)
    while arrival_s < duration_s:
        prompt = tuple(rng.choices(range(3, 251), k=rng.randint(10, 120)))
        planned.append(PlannedRequest(arrival_s, 0, prompt, MAX_TOKENS))
        arrival_s += rng.expovariate(rate_per_s)
    return planned


def measure(site: Site, mode: str, requests: Sequence[PlannedRequest], duration_s: float) -> Window:
    site.choose(mode)

    async def load() -> tuple[float, list[float], int]:
        await asyncio.sleep(SETTLE_S)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        before = site.choose(mode)
        results = await run_load(requests, [site.url], model=SERVED_NAME, timeout_s=60.0)
        await asyncio.sleep(max(0.0, start_s + duration_s - loop.time()))
        steps = site.choose("alone") - before
        took_s = loop.time() - start_s
        good = [result.e2e_s for result in results if result.e2e_s is not None]
        return steps / took_s, good, len(results) - len(good)

    steps_per_s, e2e_s, failed = asyncio.run(load())
    return Window(tuple(e2e_s), steps_per_s, failed)


def test_what_training_costs_a_server_with_each_gate(site: Site) -> None:
    rounds, seconds, rates = os.environ.get("BENCH_GATE", DEFAULT_SIZE).split()
    duration_s = float(seconds)
    rng = random.Random(0)
    print(f"\n{rounds} rounds of {seconds} s per mode, {MAX_TOKENS} tokens per answer, {os.cpu_count()} cores")
    measure(site, "ungated", poisson(4, 5, seed=999), 5)
    for rate in map(float, rates.split(",")):
        seen: dict[str, list[Window]] = {mode: [] for mode in MODES}
        for number in range(int(rounds)):
            requests = poisson(rate, duration_s, seed=number)
            for mode in rng.sample(MODES, len(MODES)):
                seen[mode].append(measure(site, mode, requests, duration_s))
        report(rate, seen)
        assert all(window.failed == 0 for windows in seen.values() for window in windows)
        assert all(window.steps_per_s == 0 for window in seen["alone"])


def report(rate: float, seen: dict[str, list[Window]]) -> None:
    print(f"\n{rate:g} requests/s")
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
