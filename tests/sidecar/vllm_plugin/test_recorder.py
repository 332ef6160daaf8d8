"""What the recorder makes of vLLM's statistics, those of other versions included."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.source.snapshot import EngineSnapshot
from sidecar.vllm_plugin.gate_reader import GateReader
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.recorder import MAX_RECORDS_PER_STEP, StepRecorder
from sidecar.vllm_plugin.records import (
    RECORD_BYTES,
    RING_CAPACITY,
    VALUES_PER_RECORD,
    VALUES_PER_REQUEST,
    RecordFlag,
    SlotFlag,
    StepRecord,
    decode_record,
)
from sidecar.vllm_plugin.step_ring import StepRing

SLO = parse_slo("ttft:100ms,itl:100ms,e2e:1s")


class Engine:
    """A recorder, and a source that follows its ring from the first step."""

    def __init__(self, directory: Path) -> None:
        self.slot = GateWriter(directory, SlotFlag.ENGINE)
        self.ring = StepRing(directory, engine=0, max_num_seqs=256)
        self.recorder = StepRecorder(self.slot, self.ring)
        self.source = RingSource(directory, SLO)
        self.gate = GateReader(directory)

    def read(self) -> EngineSnapshot:
        self.ring.beat()
        snapshot = self.source.read(t_s=1000.0, monotonic_s=time.monotonic())
        assert snapshot is not None
        return snapshot

    def close(self) -> None:
        self.source.close()
        self.gate.close()
        self.ring.close()
        self.slot.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    engine.read()
    yield engine
    engine.close()


def scheduler(running: int, waiting: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=0, kv_cache_usage=0.25, **more
    )


def iteration(**values: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "time_to_first_tokens_iter": [],
        "inter_token_latencies_iter": [],
        "finished_requests": [],
        "num_prompt_tokens": 0,
        "num_generation_tokens": 0,
        "num_preempted_reqs": 0,
    }
    return SimpleNamespace(**fields | values)


def test_each_step_is_told_exactly(engine: Engine) -> None:
    engine.recorder.record(
        scheduler(2, 1),
        iteration(time_to_first_tokens_iter=[0.05, 0.2], num_prompt_tokens=40, num_generation_tokens=2),
    )
    assert engine.gate.read(time.monotonic()).running == 2
    engine.recorder.record(
        scheduler(1),
        iteration(
            inter_token_latencies_iter=[0.1, 0.3],
            finished_requests=[SimpleNamespace(e2e_latency=0.5)],
            num_generation_tokens=2,
            num_preempted_reqs=1,
        ),
    )
    engine.recorder.record(scheduler(0), None)
    seen = engine.read()
    assert (seen.running, seen.waiting, seen.kv_usage_max_frac, seen.steps) == (0, 0, 0.25, 3)
    assert (seen.prompt_tokens, seen.generation_tokens, seen.preemptions, seen.finished) == (40, 4, 1, 1)
    assert seen.ttft is not None
    assert (seen.ttft.edges, seen.ttft.cumulative) == ((0.1, math.inf), (1, 2))
    assert seen.itl is not None
    # 0.1 is over the edge by the rounding of fp32, as any measured latency may be.
    assert seen.itl.count == 2
    assert seen.e2e is not None
    assert (seen.e2e.count, seen.e2e.mean) == (1, 0.5)
    assert engine.source.max_num_seqs == 256
    assert engine.recorder.num_failures == 0


def test_a_step_of_many_latencies_goes_into_several_records(engine: Engine) -> None:
    engine.recorder.record(scheduler(300), iteration(inter_token_latencies_iter=[0.01] * 300))
    seen = engine.read()
    assert seen.itl is not None
    assert (seen.itl.count, seen.steps) == (300, 1)


def test_a_step_beyond_all_records_says_how_much_it_leaves_out(engine: Engine) -> None:
    fits = MAX_RECORDS_PER_STEP * VALUES_PER_RECORD
    engine.recorder.record(
        scheduler(5000),
        iteration(inter_token_latencies_iter=[0.01] * (fits + 7), finished_requests=[SimpleNamespace(e2e_latency=1.0)]),
    )
    seen = engine.read()
    assert seen.e2e is not None
    assert seen.itl is not None
    assert (seen.e2e.count, seen.itl.count) == (1, fits - VALUES_PER_REQUEST)


@pytest.mark.parametrize(
    ("scheduler_stats", "iteration_stats"),
    [
        (None, None),
        (SimpleNamespace(), SimpleNamespace()),
        (SimpleNamespace(num_running_reqs="two", kv_cache_usage=None), SimpleNamespace(finished_requests=7)),
        (scheduler(-3), iteration(num_prompt_tokens=-1, time_to_first_tokens_iter="abc")),
        (scheduler(1 << 70), iteration(inter_token_latencies_iter=[0.1, None, "x", math.nan, math.inf, -1.0])),
        (object(), iteration(finished_requests=[object(), SimpleNamespace(e2e_latency=None)])),
        (42, "nonsense"),
    ],
)
def test_fields_that_are_missing_or_strange_hurt_nobody(
    engine: Engine, scheduler_stats: Any, iteration_stats: Any
) -> None:
    engine.recorder.record(scheduler_stats, iteration_stats)
    engine.recorder.record(scheduler(1), iteration(time_to_first_tokens_iter=[0.05]))
    seen = engine.read()
    assert seen.running == 1
    assert seen.ttft is not None
    assert seen.ttft.count == 1


def test_a_step_without_scheduler_statistics_keeps_the_counts(engine: Engine) -> None:
    engine.recorder.record(scheduler(3), iteration())
    engine.recorder.record(None, iteration(num_generation_tokens=3))
    assert (engine.read().running, engine.gate.read(time.monotonic()).running) == (3, 3)


def test_recording_goes_on_without_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ring = StepRing(tmp_path / "file" / "gate", engine=0)
    recorder = StepRecorder(None, ring)
    recorder.record(scheduler(1), iteration(time_to_first_tokens_iter=[0.05]))
    ring.close()
    assert recorder.num_failures == 0
    StepRecorder(None, None).record(scheduler(1), iteration())


def recorded(count_requests: int, count_ttft: int, count_itl: int) -> list[StepRecord]:
    """The records of one step with so many latencies, all of them different."""
    recorder = StepRecorder(None, ring := Written())
    recorder.record(
        scheduler(1),
        iteration(
            finished_requests=[ended(e2e_s=1000.0 + i, decode_s=i) for i in range(count_requests)],
            time_to_first_tokens_iter=[2000.0 + i for i in range(count_ttft)],
            inter_token_latencies_iter=[float(i) for i in range(count_itl)],
        ),
    )
    assert recorder.num_failures == 0
    return ring.records()


class Written(StepRing):
    """A ring in memory."""

    def __init__(self) -> None:
        self.pages = b""

    @property
    def next_sequence(self) -> int:
        return 1

    def write(self, records: Sequence[bytes]) -> None:
        self.pages += b"".join(records)

    def records(self) -> list[StepRecord]:
        padded = self.pages + bytes(-len(self.pages) % RECORD_BYTES)
        found = [decode_record(padded[at : at + RECORD_BYTES]) for at in range(0, len(padded), RECORD_BYTES)]
        return [record for record in found if record is not None]


def ended(*, e2e_s: float, decode_s: float, tpot_s: float = 0.5) -> SimpleNamespace:
    return SimpleNamespace(e2e_latency=e2e_s, decode_time=decode_s, mean_time_per_output_token=tpot_s)


@given(st.integers(0, 90), st.integers(0, 260), st.integers(0, 400))
def test_no_latency_is_lost_or_mixed_up_between_records(requests: int, ttft: int, itl: int) -> None:
    records = recorded(requests, ttft, itl)
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    assert [done for record in records for done in record.finished] == [(1000, 0.5, 1000 + i) for i in range(requests)]
    assert [value for record in records for value in record.ttft_s] == [2000 + i for i in range(ttft)]
    assert [value for record in records for value in record.itl_s] == list(range(itl))
    assert [bool(record.flags & RecordFlag.CONTINUED) for record in records] == [False] + [True] * (len(records) - 1)


def test_steps_of_several_records_survive_the_end_of_the_ring(engine: Engine) -> None:
    for _ in range(RING_CAPACITY // 3 + 50):
        engine.recorder.record(scheduler(250), iteration(inter_token_latencies_iter=[0.01] * 250))
        if engine.recorder._step % 1000 == 0:
            engine.read()
    seen = engine.read()
    assert seen.itl is not None
    assert (seen.itl.count, engine.source.lost_records) == (250 * (RING_CAPACITY // 3 + 50), 0)


def test_the_latencies_of_a_request_are_told_together(engine: Engine) -> None:
    engine.recorder.record(
        scheduler(0),
        iteration(
            finished_requests=[
                ended(e2e_s=0.5, decode_s=0.45),
                ended(e2e_s=0.5, decode_s=0.25, tpot_s=0.01),
                ended(e2e_s=0.5, decode_s=0.45, tpot_s=0.01),
                SimpleNamespace(e2e_latency=0.5),
                SimpleNamespace(e2e_latency=2.0),
                SimpleNamespace(e2e_latency=1e300, decode_time="x"),
            ]
        ),
    )
    # By TPOT, by TTFT, none; unknown but for e2e, once within its bound and once over it; nothing known.
    assert engine.read().judged == (6, 3, 5)
