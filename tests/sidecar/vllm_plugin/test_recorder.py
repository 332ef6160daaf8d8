"""What the recorder makes of vLLM's statistics, those of other versions included."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.source.ring import RingSource
from sidecar.source.snapshot import EngineSnapshot
from sidecar.vllm_plugin.gate_reader import GateReader
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.recorder import MAX_RECORDS_PER_STEP, StepRecorder
from sidecar.vllm_plugin.records import VALUES_PER_RECORD, SlotFlag
from sidecar.vllm_plugin.step_ring import StepRing

EDGES_S = (0.1,)


class Engine:
    """A recorder, and a source that follows its ring from the first step."""

    def __init__(self, directory: Path) -> None:
        self.slot = GateWriter(directory, SlotFlag.ENGINE)
        self.ring = StepRing(directory, engine=0, max_num_seqs=256)
        self.recorder = StepRecorder(self.slot, self.ring)
        self.source = RingSource(directory, edges_s=EDGES_S)
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
    assert (seen.e2e.count, seen.itl.count) == (1, fits - 1)


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
