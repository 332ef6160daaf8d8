"""What a controller bears: sidecars at one sample per second through relays, and islands that beat and poll.

The controller runs on one core, the load on the others. ``BENCH_CONTROLLER='SECONDS SIDECARS ISLANDS'`` sets the size.
Printed are the share of ticks within 50 ms and their 99th percentile (linear within a histogram's bucket), what became
of the samples, how long directives took from decision to island, and the controller's memory over time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replay.processes import free_ports
from tests.bench.fleet_load import Connection, Island, Seen, percentile, relay, sample_bodies
from tests.bench.process_cost import cpu_s, resident_mb

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]

DEFAULT_SIZE = "600 10000 1000"
HOST = "127.0.0.1"
PER_RELAY = 500
CORE = 0
TICK_LIMIT_S = 0.05
WATCH_PERIOD_S = 5.0
START_DEADLINE_S = 60.0
WARM_UP_S = 15.0
"""Until every server was heard of, and its first sample is in the journal."""
NUM_DECISIONS = 1_000_000
NUM_QUERIES = 200
OPEN_FILES = 8192
SHARES = {"p50": 0.5, "p99": 0.99, "most": 1.0}


@contextmanager
def controller(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A controller on one core of its own, and its port."""
    (port,) = free_ports(1, range(18800, 18900))
    base = ["--host", HOST, "--port", str(port), "--journal", str(folder / "journal.sqlite")]
    command = [sys.executable, "-m", "wadiloco", "controller", *base, *options]
    with (folder / "controller.log").open("wb") as log:
        child = subprocess.Popen(
            ["prlimit", f"--nofile={OPEN_FILES}", "taskset", "-c", str(CORE), *command], stdout=log, stderr=log
        )
        try:
            _await_start(port, child)
            yield child, port
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _await_start(port: int, child: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s:
        assert child.poll() is None, "the controller ended"
        try:
            if httpx.get(f"http://{HOST}:{port}/healthz", trust_env=False).is_success:
                return
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError("the controller did not start")


@dataclass(frozen=True, slots=True)
class Reading:
    """What the controller's own metrics say."""

    ticks: dict[float, float]
    """Upper edge → ticks at or under it."""
    values: dict[str, float]


def read_metrics(text: str) -> Reading:
    ticks: dict[float, float] = {}
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "wadiloco_controller_tick_seconds_bucket":
                ticks[float(sample.labels["le"])] = sample.value
            elif not sample.name.endswith("_bucket"):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return Reading(ticks, values)


def tick_percentile_s(before: Reading, after: Reading, share: float) -> float:
    counts = {edge: after.ticks[edge] - before.ticks.get(edge, 0.0) for edge in sorted(after.ticks)}
    wanted, low_s, below = share * max(counts.values()), 0.0, 0.0
    for edge_s, count in counts.items():
        if count >= wanted:
            within = (wanted - below) / (count - below) if count > below else 1.0
            return low_s + (min(edge_s, 10.0) - low_s) * within
        low_s, below = edge_s, count
    return low_s


async def bear(pid: int, port: int, *, seconds: float, sidecars: int, islands: int) -> None:
    """Load for so many seconds, and print what was seen."""
    rng, seen = random.Random(0), Seen()
    fleet = [Island(number, number % sidecars, HOST, port) for number in range(islands)]
    connections: list[Connection] = []

    def connect() -> Connection:
        connections.append(Connection(HOST, port))
        return connections[-1]

    joining = connect()
    for island in fleet:
        await island.join(joining)
    end_s = time.monotonic() + WARM_UP_S + seconds
    jobs = [
        relay(connect(), sample_bodies(first, min(PER_RELAY, sidecars - first), rng), seen, end_s)
        for first in range(0, sidecars, PER_RELAY)
    ]
    for island in fleet:
        jobs += [island.beat_until(connect(), seen, end_s)]
        jobs += [island.poll_until(connect(), seen, end_s)]
    memory_mb: list[float] = []
    jobs.append(_watch(pid, memory_mb, end_s))
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60, trust_env=False) as http:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
            await asyncio.sleep(WARM_UP_S)
            before, used_s, began_s = read_metrics((await http.get("/metrics")).text), cpu_s(pid), time.monotonic()
            seen.push_s.clear()
            seen.directive_s.clear()
        after, used_s = read_metrics((await http.get("/metrics")).text), cpu_s(pid) - used_s
        busy = used_s / (time.monotonic() - began_s)
    for connection in connections:
        connection.close()
    _report(seen, before, after, memory_mb, busy=busy)


async def _watch(pid: int, memory_mb: list[float], end_s: float) -> None:
    while time.monotonic() < end_s:
        memory_mb.append(resident_mb(pid))
        await asyncio.sleep(WATCH_PERIOD_S)


def _report(seen: Seen, before: Reading, after: Reading, memory_mb: list[float], *, busy: float) -> None:
    ticks = after.ticks[float("inf")] - before.ticks[float("inf")]
    within = after.ticks[TICK_LIMIT_S] - before.ticks[TICK_LIMIT_S]
    p50_s, p99_s = (tick_percentile_s(before, after, share) for share in (0.5, 0.99))
    dropped = after.values.get("wadiloco_controller_journal_dropped_rows_total", 0.0)
    quarter = max(1, len(memory_mb) // 4)
    means_mb = [statistics.mean(memory_mb[start : start + quarter]) for start in range(0, len(memory_mb), quarter)]
    print(
        f"ticks      {ticks:.0f}: {within / ticks:.2%} within 50 ms, p50 {p50_s * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms"
    )
    lost = f"{sum(seen.refusals.values())} refused, {dropped:.0f} rows dropped"
    print(f"samples    {seen.samples_sent} sent, {seen.samples_accepted} accepted, {lost}")
    print(f"pushes     {len(seen.push_s)}: {spread_ms(seen.push_s)}; {seen.pushes_failed} failed")
    print(f"directives {len(seen.directive_s)}: {spread_ms(seen.directive_s)}; {seen.polls_failed} polls failed")
    print(f"heartbeats {seen.beats}, {seen.beats_failed} failed")
    assert (ticks > 0, seen.refusals, dropped, seen.samples_accepted) == (True, {}, 0, seen.samples_sent)
    assert (seen.pushes_failed, seen.polls_failed, seen.beats_failed) == (0, 0, 0)
    print(f"controller {busy:.0%} of a core; resident MB over time: {', '.join(f'{mean:.0f}' for mean in means_mb)}")


def spread_ms(values_s: Sequence[float]) -> str:
    return ", ".join(f"{name} {percentile(values_s, share) * 1e3:.1f} ms" for name, share in SHARES.items())


@pytest.mark.parametrize("mode", ["synchronous", "per_island"])
def test_a_large_fleet_on_one_core(tmp_path: Path, mode: str) -> None:
    seconds, sidecars, islands = map(int, os.environ.get("BENCH_CONTROLLER", DEFAULT_SIZE).split())
    limits = ["--num-slots", str(islands), "--min-h", "64", "--max-h", "256", "--lease-timeout-s", "100"]
    rule = ["--policy", "wa_forecast", "--mode", mode, "--journal-samples-every-s", "10", "--stale-after-s", "10"]
    all_cores = os.sched_getaffinity(0)
    print(f"\n{mode}: {sidecars} sidecars at 1 Hz in batches of {PER_RELAY}, {islands} islands, {seconds} s, "
          f"{len(all_cores)} cores, controller on core {CORE}")  # fmt: skip
    with controller(tmp_path, *limits, *rule) as (child, port):
        os.sched_setaffinity(0, all_cores - {CORE} or all_cores)
        try:
            asyncio.run(bear(child.pid, port, seconds=seconds, sidecars=sidecars, islands=islands))
        finally:
            os.sched_setaffinity(0, all_cores)
        print(f"journal    {sum(p.stat().st_size for p in tmp_path.glob('journal.sqlite*')) / 1e6:.0f} MB")


def test_a_million_decisions_answer_at_once(tmp_path: Path) -> None:
    with controller(tmp_path, "--num-slots", "1"):
        pass  # makes the journal
    terms = json.dumps({f"term_{index}": index / 7 for index in range(12)})
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("DELETE FROM decisions")  # of the first tick
        database.executemany(
            "INSERT INTO decisions (id, t_s, policy, action, reason, round, slots, terms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ((n, time.time() - 86400 + n / 20, "wa_forecast", "defer", "cost_high", n // 1000, "[0, 1]", terms)
             for n in range(1, NUM_DECISIONS + 1)),
        )  # fmt: skip
    database.close()
    with (
        controller(tmp_path, "--num-slots", "1") as (_, port),
        httpx.Client(base_url=f"http://{HOST}:{port}", timeout=60, trust_env=False) as http,
    ):
        for query in ({}, {"since": NUM_DECISIONS // 2}):
            took_s = []
            for _ in range(NUM_QUERIES):
                began_s = time.perf_counter()
                answer = http.get("/v1/decisions", params={"limit": 100, **query}).raise_for_status()
                took_s.append(time.perf_counter() - began_s)
                assert len(answer.json()["decisions"]) == 100
            print(f"\n100 of {NUM_DECISIONS} decisions ({query or 'newest'}): {spread_ms(took_s)}")
