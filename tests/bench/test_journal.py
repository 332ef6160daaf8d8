"""What the journal's database bears: rows per second, queries over a million rows, and an outage of half a minute.

Reach: 10,000 sample rows per second, and pages of 100 decisions among 1,000,000 in at most 20 ms.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from controller.journal import Journal
from controller.journal_store import Batch
from controller.journal_tables import decision_row
from sidecar.schema import LoadSample
from tests.controller.conftest import (  # noqa: F401 - fixtures
    DatabasePlace,
    Place,
    database,
    decision,
    place,
)
from tests.controller.helpers import sample
from tests.controller.postgres import Server
from tests.controller.processes import controller, eventually
from tests.controller.test_failover import Stream, leads, live_without_database

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

NUM_SERVERS = 10_000
SECONDS = 5
NUM_DECISIONS = 1_000_000


def bodies() -> list[str]:
    """A sample of each server with a forecast of the usual size."""
    points = [
        {
            "horizon_s": float(horizon),
            "arrivals_per_s": 3.2,
            "arrivals_per_s_q10": 0.5,
            "arrivals_per_s_q50": 3.0,
            "arrivals_per_s_q90": 8.0,
            "running": 4.1,
            "running_q90": 9.0,
            "method": "simple",
        }
        for horizon in (1, 2, 5, 10, 20, 30, 60)
    ]
    made = LoadSample.model_validate(sample(forecast=points))
    return [made.model_copy(update={"server_id": f"vllm-{number}"}).model_dump_json() for number in range(NUM_SERVERS)]


def test_ten_thousand_samples_per_second(place: Place) -> None:  # noqa: F811
    journal, texts = Journal(place.open_store()), bodies()

    async def second(t_s: float) -> None:
        for number, body in enumerate(texts):
            journal.append("samples", (f"vllm-{number}", t_s, body))
            journal.put("servers", f"vllm-{number}", body)
        await journal.commit()

    started_s, cpu_s = time.perf_counter(), time.process_time()
    for t_s in range(SECONDS):
        asyncio.run(second(float(t_s)))
    took_s, used_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    journal.close()
    rows = NUM_SERVERS * SECONDS
    print(
        f"\n{type(place).__name__}: {rows / took_s:,.0f} sample rows/s, each with its server's newest state "
        f"({len(texts[0])} bytes), {used_s / took_s:.0%} of a core in this process"
    )
    assert rows / took_s >= 10_000


def test_pages_among_a_million_decisions(place: Place) -> None:  # noqa: F811
    store = place.open_store()
    for first in range(1, NUM_DECISIONS + 1, 50_000):
        rows = [decision_row(decision(number, t_s=float(number))) for number in range(first, first + 50_000)]
        store.write(Batch(number=first, target=first, log={"decisions": rows}))
    reader = place.reader()

    def newest() -> object:
        return reader.decisions(since=reader.before_newest("decisions", 100), limit=100)

    queries: dict[str, Callable[[], object]] = {
        "newest 100": newest,
        "100 from the middle": lambda: reader.decisions(since=NUM_DECISIONS // 2, limit=100),
        "first 100": lambda: reader.page("decisions", since=0, limit=100),
    }
    for name, query in queries.items():
        times_ms = [timed_ms(query) for _ in range(50)]
        median_ms = statistics.median(times_ms)
        print(f"\n{type(place).__name__}: {name}: {median_ms:.1f} ms, slowest {max(times_ms):.1f} ms")
        assert median_ms <= 20
    times_ms = [timed_ms(lambda: store.prune("decisions", 200_000.0, limit=2000)) for _ in range(50)]
    print(
        f"{type(place).__name__}: prune of 2000: {statistics.median(times_ms):.1f} ms, slowest {max(times_ms):.1f} ms"
    )
    store.close()


def timed_ms(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started_s)


def test_half_a_minute_without_the_database(
    postgres_server: Server,
    database: DatabasePlace,  # noqa: F811
) -> None:
    with controller(database.url) as one:
        eventually(lambda: leads(one), "the lead")
        with closing(Stream([one.url])) as stream:
            live_without_database(postgres_server, database, stream, one, away_s=30.0)
        print(f"\nlongest time without an answer: {stream.longest_gap_s:.1f} s, {stream.round} rounds, none lost")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_how_long_a_takeover_takes(database: DatabasePlace, how: str) -> None:  # noqa: F811
    with controller(database.url) as first:
        eventually(lambda: leads(first), "the first lead")
        with controller(database.url) as second, closing(Stream([first.url, second.url])) as stream:
            eventually(lambda: stream.round >= 5, "rounds")
            stopped_s = time.monotonic()
            os.kill(first.child.pid, getattr(signal, how))
            eventually(lambda: leads(second), "the second's lead")
            took_s = time.monotonic() - stopped_s
            rounds = stream.round
            eventually(lambda: stream.round >= rounds + 3, "rounds again")
            stream.settle()
            print(f"\n{how}: leads after {took_s:.2f} s (failover_s 5), without an answer {stream.longest_gap_s:.2f} s")
