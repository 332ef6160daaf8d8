"""What a sidecar costs: its own CPU and memory at one scrape per second, and the throughput that its server loses.

Batches of requests that keep the server full, in pairs of one beside a sidecar that scrapes and one beside a sidecar
that is stopped (SIGSTOP), in random order; the ratio of their times is the loss. ``BENCH_SIDECAR='PAIRS REQUESTS'``.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.loadgen import PlannedRequest, run_load
from replay.processes import Child, Children, answers, free_ports, wait_for
from replay.vllm_server import AS_SHIPPED, SERVED_NAME, START_DEADLINE_S, LocalVllm, start_vllm
from tests.bench.process_cost import cpu_s, resident_mb

pytestmark = [pytest.mark.bench, pytest.mark.vllm, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
DEFAULT_SIZE = "20 96"
MAX_TOKENS = 64
IDLE_S = 30.0


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[str, Child]]:
    """A server and the sidecar that scrapes it."""
    vllm = LocalVllm(ROOT / os.environ.get("VLLM_VENV", ".venv-vllm"), ROOT / ".local" / "tiny-llama")
    vllm.check()
    children = Children()
    port, sidecar_port = free_ports(2, range(18600, 18700))
    url, sidecar_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{sidecar_port}"
    try:
        start_vllm(children, vllm, name="vllm", port=port, core=None, logs=tmp_path, env=AS_SHIPPED)
        command = [sys.executable, "-m", "wadiloco", "sidecar", "--vllm", url, "--port", str(sidecar_port)]
        sidecar = children.start("sidecar", command, log=tmp_path / "sidecar.log")

        for each in (url + "/health", sidecar_url + "/readyz"):
            up = functools.partial(answers, each)
            asyncio.run(wait_for(each, up, children=children, deadline_s=START_DEADLINE_S, period_s=1))
        yield url, sidecar
    finally:
        children.stop()


def core_share(pid: int, during_s: float) -> float:
    before_s, started_s = cpu_s(pid), time.monotonic()
    time.sleep(during_s)
    return (cpu_s(pid) - before_s) / (time.monotonic() - started_s)


def batch_s(url: str, num_requests: int, seed: int) -> float:
    """Time of a batch that is there at once."""
    rng = random.Random(seed)
    requests = [
        PlannedRequest(0.0, 0, tuple(rng.choices(range(3, 251), k=rng.randint(10, 120))), MAX_TOKENS)
        for _ in range(num_requests)
    ]
    results = asyncio.run(run_load(requests, [url], model=SERVED_NAME, timeout_s=300.0))
    assert all(result.ok for result in results)
    return max(result.ended_s for result in results)


def test_what_a_sidecar_costs(watched: tuple[str, Child]) -> None:
    url, sidecar = watched
    pairs, num_requests = map(int, os.environ.get("BENCH_SIDECAR", DEFAULT_SIZE).split())
    pid = sidecar.process.pid
    for seed in range(3):
        batch_s(url, num_requests, seed)
    idle = core_share(pid, IDLE_S)
    rng = random.Random(0)
    ratios, scraped = [], []
    for pair in range(pairs):
        took_s = {}
        for is_scraping in rng.sample([True, False], 2):
            os.kill(pid, signal.SIGCONT if is_scraping else signal.SIGSTOP)
            time.sleep(1.0)
            took_s[is_scraping] = batch_s(url, num_requests, pair)
        scraped.append(took_s[True])
        ratios.append(took_s[True] / took_s[False])
    os.kill(pid, signal.SIGCONT)
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"\nsidecar at one scrape per second, {os.cpu_count()} cores\n"
        f"core share {100 * idle:.2f} %, resident {resident_mb(pid):.0f} MB\n"
        f"{pairs} pairs of {num_requests} requests at once, {MAX_TOKENS} tokens each: "
        f"{statistics.median(scraped):.2f} s a batch\n"
        f"time beside a scraping sidecar / beside a stopped one: median {statistics.median(ratios):.4f}, "
        f"quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}"
    )
