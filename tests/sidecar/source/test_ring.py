"""The reader of the plugin's rings: what a sidecar makes of files that others write, cut and replace."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource, overlay
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome
from sidecar.source.window import difference, restarted
from sidecar.vllm_plugin.records import (
    RECORD_BYTES,
    RING_CAPACITY,
    RING_HEADER_BYTES,
    FinishedRequest,
    StepRecord,
    encode_record,
    record_offset,
)
from sidecar.vllm_plugin.step_ring import RING_BYTES, StepRing
from tests.sidecar.helpers import bad, capture, good, parse

REPOSITORY = Path(__file__).parents[3]


GOOD = FinishedRequest(ttft_s=9.0, tpot_s=0.01, e2e_s=0.1)


def write(
    ring: StepRing, count: int = 1, *, running: int = 1, finished: FinishedRequest = GOOD, beat: bool = True
) -> None:
    for _ in range(count):
        number = ring.next_sequence
        record = StepRecord(
            sequence=number,
            at_ns=time.monotonic_ns(),
            step=number,
            running=running,
            waiting=0,
            kv_usage=0.5,
            generation_tokens_total=10 * number,
            finished_total=number,
            finished=(finished,),
            itl_s=(0.01,),
        )
        ring.write([encode_record(record)])
    if beat:
        ring.beat()


def read(source: RingSource) -> EngineSnapshot | None:
    return source.read(t_s=1000.0, monotonic_s=time.monotonic())


def known(source: RingSource) -> EngineSnapshot:
    snapshot = read(source)
    assert snapshot is not None
    return snapshot


def itls(snapshot: EngineSnapshot) -> float:
    assert snapshot.itl is not None
    return snapshot.itl.count


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[StepRing]:
    ring = StepRing(tmp_path, engine=0)
    yield ring
    ring.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[RingSource]:
    source = RingSource(tmp_path, parse_slo("itl:50ms,tpot:20ms,e2e:200ms"))
    yield source
    source.close()


def test_without_a_plugin_nothing_is_known(source: RingSource) -> None:
    assert read(source) is None


def test_steps_are_counted_once_over_many_polls(ring: StepRing, source: RingSource) -> None:
    known(source)
    for polls in range(1, 6):
        write(ring, 7)
        snapshot = known(source)
        assert (snapshot.steps, itls(snapshot)) == (7 * polls, 7 * polls)
        assert snapshot.generation_tokens == 70 * polls


def test_a_sidecar_that_starts_late_knows_the_totals_and_the_gauges(ring: StepRing, source: RingSource) -> None:
    write(ring, 9, running=4)
    snapshot = known(source)
    assert (snapshot.steps, snapshot.running, itls(snapshot)) == (9, 4, 0)
    write(ring)
    assert itls(known(source)) == 1


def test_steps_between_the_last_heartbeat_and_the_start_are_totals_too(ring: StepRing, source: RingSource) -> None:
    write(ring, 3)
    write(ring, 5, beat=False)
    snapshot = known(source)
    assert (snapshot.steps, itls(snapshot)) == (8, 0)
    write(ring, 2, beat=False)
    snapshot = known(source)
    assert (snapshot.steps, itls(snapshot)) == (10, 2)


def test_a_snapshot_names_those_who_counted(tmp_path: Path, ring: StepRing, source: RingSource) -> None:
    write(ring)
    alone = known(source).writers
    other = StepRing(tmp_path, engine=1)
    both = known(source).writers
    other.close()
    assert (len(alone), len(both), alone < both, known(source).writers == alone) == (1, 2, True, True)


def test_a_reader_that_was_away_too_long_loses_latencies_but_no_totals(ring: StepRing, source: RingSource) -> None:
    known(source)
    write(ring, 10)
    known(source)
    write(ring, RING_CAPACITY + 100)
    snapshot = known(source)
    assert snapshot.steps == RING_CAPACITY + 110
    assert source.lost_records > 100
    assert itls(snapshot) + source.lost_records == RING_CAPACITY + 110


def test_two_api_servers_of_one_engine_add_up_and_the_newest_step_holds(
    tmp_path: Path, ring: StepRing, source: RingSource
) -> None:
    write(ring, running=5)
    (tmp_path / "steps-0-1.ring").write_bytes(next(tmp_path.glob("*.ring")).read_bytes())
    write(ring, running=2)
    snapshot = known(source)
    assert (snapshot.running, snapshot.steps, snapshot.num_engines) == (2, 3, 1)


def test_an_idle_plugin_lives_by_its_heartbeat(ring: StepRing, source: RingSource) -> None:
    write(ring)
    now_s = time.monotonic()
    assert source.read(t_s=1000.0, monotonic_s=now_s + 1.0) is not None
    assert source.read(t_s=1000.0, monotonic_s=now_s + 5.0) is None


def test_a_truncated_ring_is_unknown_until_its_writer_repairs_it(
    tmp_path: Path, ring: StepRing, source: RingSource
) -> None:
    write(ring, 3)
    known(source)
    os.truncate(next(tmp_path.glob("*.ring")), 10)
    assert read(source) is None
    write(ring)
    assert known(source).steps is not None


def test_a_damaged_record_is_passed_over(tmp_path: Path, ring: StepRing, source: RingSource) -> None:
    known(source)
    write(ring, 3)
    with next(tmp_path.glob("*.ring")).open("r+b") as file:
        file.seek(record_offset(2))
        file.write(b"scribble")
    snapshot = known(source)
    assert (snapshot.steps, itls(snapshot), source.lost_records) == (3, 2, 1)


def test_a_replaced_ring_is_opened_anew(tmp_path: Path, ring: StepRing, source: RingSource) -> None:
    write(ring, 3)
    known(source)
    next(tmp_path.glob("*.ring")).unlink()
    write(ring, 2)
    known(source)
    write(ring, 2)
    assert known(source).steps == 7


def test_a_killed_server_leaves_a_ring_that_the_next_one_removes(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from sidecar.vllm_plugin.step_ring import StepRing;"
        "StepRing(Path(sys.argv[1]), engine=0); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, check=False)
    assert len(list(tmp_path.glob("*.ring"))) == 1
    ring = StepRing(tmp_path, engine=0)
    assert [path.name for path in tmp_path.glob("*.ring")] == [f"steps-0-{os.getpid()}.ring"]
    ring.close()
    assert not list(tmp_path.glob("*.ring"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.binary(max_size=3 * RECORD_BYTES),
    st.lists(st.tuples(st.integers(0, RING_HEADER_BYTES + 4 * RECORD_BYTES), st.binary(max_size=80)), max_size=6),
    st.integers(0, RING_BYTES),
)
def test_no_content_makes_the_reader_raise_or_hang(
    tmp_path: Path, garbage: bytes, patches: list[tuple[int, bytes]], length: int
) -> None:
    ring = StepRing(tmp_path, engine=0)
    source = RingSource(tmp_path, parse_slo("itl:100ms"))
    write(ring, 3)
    path = next(tmp_path.glob("*.ring"))
    (tmp_path / "steps-9-9.ring").write_bytes(garbage)
    (tmp_path / "steps-folder.ring").mkdir(exist_ok=True)
    with path.open("r+b") as file:
        for position, patch in patches:
            file.seek(position)
            file.write(patch)
        file.truncate(max(length, RECORD_BYTES))
    snapshot = read(source)
    assert snapshot is None or snapshot.running is not None
    source.close()
    ring.close()


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("flip"), st.integers(0, RING_HEADER_BYTES + 8 * RECORD_BYTES), st.integers(0, 7)),
    st.tuples(st.just("truncate"), st.integers(0, RING_BYTES), st.just(0)),
    st.tuples(st.just("replace"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("unlink"), st.just(0), st.just(0)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATIONS, max_size=12))
def test_a_reader_that_follows_survives_whatever_happens_to_the_file(
    tmp_path: Path, operations: list[tuple[str, int, int]]
) -> None:
    ring, source = StepRing(tmp_path, engine=0), RingSource(tmp_path, parse_slo("e2e:1000s"))
    for operation, place, bit in operations:
        path = next(tmp_path.glob("*.ring"), None)
        if operation == "write":
            write(ring, place)
        elif path is not None and operation == "flip":
            content = bytearray(path.read_bytes()[: RING_HEADER_BYTES + 9 * RECORD_BYTES])
            if place < len(content):
                content[place] ^= 1 << bit
                with path.open("r+b") as file:
                    file.write(content)
        elif path is not None and operation == "truncate":
            os.truncate(path, place)
        elif path is not None and operation == "replace":
            path.unlink()
            path.write_bytes(bytes(place * RECORD_BYTES))
        elif path is not None:
            path.unlink()
        snapshot = read(source)
        if snapshot is not None:
            assert itls(snapshot) <= ring.next_sequence
            assert 0 <= (snapshot.steps or 0) <= ring.next_sequence
            assert snapshot.kv_usage_max_frac in {None, 0.5}
    source.close()
    ring.close()


def test_a_wall_clock_that_jumps_is_no_restart(ring: StepRing, source: RingSource) -> None:
    write(ring)
    before = source.read(t_s=1000.0, monotonic_s=time.monotonic())
    write(ring)
    after = source.read(t_s=9000.0, monotonic_s=time.monotonic())
    assert before is not None
    assert after is not None
    assert not restarted(before, after)
    assert difference(before, after) is not None


def test_a_record_far_ahead_ends_in_bounded_time(tmp_path: Path, ring: StepRing, source: RingSource) -> None:
    write(ring, 2)
    known(source)
    with next(tmp_path.glob("*.ring")).open("r+b") as file:
        for sequence in range(1, RING_CAPACITY + 1, 97):
            file.seek(record_offset(sequence))
            ahead = sequence + (1 << 40)
            file.write(
                encode_record(StepRecord(sequence=ahead, at_ns=0, step=1, running=0, waiting=0, kv_usage=math.nan))
            )
    started_s = time.monotonic()
    read(source)
    assert time.monotonic() - started_s < 5.0


def test_the_plugin_knows_better_than_the_page_and_replaces_a_failed_scrape(ring: StepRing, source: RingSource) -> None:
    write(ring, 3, running=2)
    exact = known(source)
    page = parse(capture("busy"))
    both = overlay(good(page), exact).snapshot
    assert both is not None
    assert (both.running, both.steps) == (2, 3)
    assert (both.process_start_s, both.asleep, both.t_s) == (page.process_start_s, page.asleep, page.t_s)
    assert both.signals["running"] == "plugin:steps"
    saturated = overlay(bad(ScrapeOutcome.TIMEOUT, t_s=5.0), exact)
    assert (saturated.outcome, saturated.snapshot) == (ScrapeOutcome.OK, exact)
    assert overlay(good(page), None).snapshot == page


@pytest.mark.parametrize(
    ("finished", "violations", "upper"),
    [
        (GOOD, 0, 0),
        (GOOD._replace(e2e_s=0.3), 1, 1),
        (GOOD._replace(tpot_s=0.03), 1, 1),
        (GOOD._replace(tpot_s=math.nan), 0, 1),
        (GOOD._replace(tpot_s=math.nan, e2e_s=0.3), 1, 1),
        (GOOD._replace(ttft_s=math.nan), 0, 0),
    ],
)
def test_each_finished_request_is_judged_by_all_objectives(
    ring: StepRing, source: RingSource, finished: FinishedRequest, violations: int, upper: int
) -> None:
    before = known(source)
    write(ring, 2, finished=finished)
    write(ring, 1)
    now = replace(known(source), monotonic_s=before.monotonic_s + 1)
    interval = difference(before, now)
    assert interval is not None
    assert interval.judged == (3, 2 * violations, 2 * upper)


def test_requests_whose_records_were_lost_may_have_violated(ring: StepRing, source: RingSource) -> None:
    before = known(source)
    write(ring, 10)
    known(source)
    write(ring, RING_CAPACITY + 100)
    interval = difference(before, replace(known(source), monotonic_s=before.monotonic_s + 1))
    assert interval is not None
    assert interval.judged == (RING_CAPACITY + 110, 0, source.lost_records)


def test_the_histograms_of_the_plugin_have_the_thresholds_as_edges(ring: StepRing, source: RingSource) -> None:
    write(ring)
    snapshot = known(source)
    edges = [getattr(snapshot, name).edges for name in ("ttft", "itl", "tpot", "e2e")]
    assert edges == [(math.inf,), (0.05, math.inf), (0.02, 0.05, math.inf), (0.2, math.inf)]


def test_a_plugin_of_another_version_is_unknown_and_warned_of_once(
    tmp_path: Path, ring: StepRing, source: RingSource, caplog: pytest.LogCaptureFixture
) -> None:
    write(ring)
    with next(tmp_path.glob("*.ring")).open("r+b") as file:
        file.write(b"WDLRING\x01")
    assert [read(source), read(source)] == [None, None]
    assert caplog.text.count("install the wadiloco-vllm-plugin that belongs to this sidecar") == 1


def test_a_server_that_refuses_connections_is_not_up_although_its_plugin_lives(
    ring: StepRing, source: RingSource
) -> None:
    write(ring, 3)
    refused = bad(ScrapeOutcome.REFUSED, t_s=5.0)
    assert overlay(refused, known(source)) == refused
