"""Two rank workers of one island as real processes: the first hears orders, and both obey."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from diloco.byte_text import ByteText
from diloco.inner import InnerConfig, InnerLoop
from diloco.model import ModelSize
from diloco.protocol import (
    FailedEvent,
    GroupPlace,
    PauseCommand,
    ProgressEvent,
    ReadyEvent,
    ResumeCommand,
    StopCommand,
    SyncCommand,
    SyncedEvent,
)
from diloco.schema import Phase, SyncOutcome
from diloco.workload import Shard
from diloco.workload_loading import build_module
from sidecar.vllm_plugin.gate_writer import GateWriter, Heartbeat
from sidecar.vllm_plugin.records import SlotFlag
from tests.diloco.test_worker import DEADLINE_S, OWN, Start, WorkerUnderTest, start

__all__ = ["start"]

pytestmark = pytest.mark.integration

Serve = Callable[..., str]
Pair = Callable[..., tuple[WorkerUnderTest, WorkerUnderTest]]
TIMEOUT_S = 30.0


@pytest.fixture
def pair(start: Start, store_url: str) -> Pair:
    def begin(url: str, *, epoch: int = 1, **overrides: Any) -> tuple[WorkerUnderTest, WorkerUnderTest]:
        place = GroupPlace(
            store_url=store_url, store_token=SecretStr("any"), name="slot-0", epoch=epoch, timeout_s=TIMEOUT_S
        )
        first, second = (start(url, rank=rank, num_ranks=2, group=place, **overrides) for rank in range(2))
        return first, second

    return begin


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[GateWriter]:
    writer = GateWriter(tmp_path / "gate", SlotFlag.INGRESS)
    heartbeat = Heartbeat()
    heartbeat.add(writer.beat)
    yield writer
    heartbeat.stop()
    writer.close()


def stop(first: WorkerUnderTest, second: WorkerUnderTest) -> None:
    # As the agent does: the follower waits for its leader's word all the same.
    for worker in (second, first):
        worker.send(StopCommand())
    assert (first.finish(), second.finish()) == (0, 0)


@pytest.mark.parametrize("workload", [{}, OWN], ids=["built-in", "own"])
def test_orders_reach_ranks_that_wait_for_the_gate(
    serve: Serve, pair: Pair, tmp_path: Path, gate: GateWriter, workload: dict[str, Any]
) -> None:
    first, second = pair(serve(tmp_path / "sync", quorum=1), gate=tmp_path / "gate", **workload)
    first.progress(lambda p: p.step > 5 and p.yielded_s is not None)
    gate.update(in_flight=1)
    first.progress(lambda p: p.yield_reason == "in_flight")
    held = first.progress(lambda p: p.yield_reason == "in_flight")
    assert first.progress(lambda p: (p.yielded_s or 0.0) > (held.yielded_s or 0.0) + 1.0).step == held.step
    assert first.sync(0).outcome is SyncOutcome.APPLIED
    first.send(PauseCommand())
    first.progress(lambda p: p.phase is Phase.PAUSED and p.step == held.step)
    first.send(ResumeCommand())
    first.progress(lambda p: p.yield_reason == "in_flight" and p.step == held.step)
    gate.update(in_flight=0)
    first.progress(lambda p: p.step > held.step + 5 and p.yield_reason is None)
    gate.update(in_flight=1)
    first.progress(lambda p: p.yield_reason == "in_flight")
    stop(first, second)


def test_both_ranks_train_on_while_a_round_is_open(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    first, second = pair(serve(tmp_path / "sync", quorum=2))
    first.wait_for(ReadyEvent)
    before = first.progress(lambda p: p.step > 10)
    seen = len(first.events)
    # The round does not close, for there is no other island.
    first.send(SyncCommand(round=0, epoch=1, deadline_s=time.time() + 3.0, overlap=True))
    report = first.wait_for(SyncedEvent, after=seen).report
    assert report.outcome is SyncOutcome.FAILED
    assert first.progress(lambda p: p.phase is Phase.INNER).step > before.step + 10
    assert not any(isinstance(event, FailedEvent) for event in first.events)
    stop(first, second)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_fragments": 2, "codec": "int4", "accumulation_steps": 2}],
    ids=["whole", "fragments"],
)
def test_both_ranks_adopt_what_came_beside_inner_steps(
    serve: Serve, pair: Pair, tmp_path: Path, options: dict[str, Any]
) -> None:
    first, second = pair(serve(tmp_path / "sync", quorum=1), **options)
    first.wait_for(ReadyEvent)
    for number in range(4):
        before = first.progress(lambda p: p.phase is Phase.INNER)
        seen = len(first.events)
        first.send(SyncCommand(round=number, epoch=1, deadline_s=time.time() + DEADLINE_S, overlap=True))
        report = first.wait_for(SyncedEvent, after=seen).report
        assert (report.outcome, report.round) == (SyncOutcome.APPLIED, number)
        first.progress(lambda p, step=before.step: p.step > step)  # type: ignore[misc]
    # It begins with a comparison of digests, and ends with another.
    assert first.sync(4).outcome is SyncOutcome.APPLIED
    assert not any(isinstance(event, FailedEvent) for event in (*first.events, *second.events))
    stop(first, second)


def losses_of_one_rank(corpus: Path, shape: dict[str, int], *, start_step: int, until_step: int) -> dict[int, float]:
    """By the number of steps taken, with two batches each."""
    size = ModelSize(num_layers=1, num_heads=2, width=shape["width"], context=shape["context"])
    workload = ByteText(size, data=(corpus,), batch_size=shape["batch_size"])
    config = InnerConfig(lr=3e-3, warmup_steps=5, weight_decay=0.1, clip_norm=1.0)
    inner = InnerLoop(build_module(workload, seed=0), config, step=start_step)
    batches = workload.batches(Shard(slot=0, num_shards=2, seed=0), position=2 * start_step)
    losses: dict[int, float] = {}
    while inner.step < until_step:
        assert inner.take_step(next(batches), next(batches))
        losses[inner.step] = inner.loss or 0.0
    return losses


def test_two_ranks_accumulate_as_one_does(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    shape = {"width": 128, "context": 64, "batch_size": 16}
    first, second = pair(serve(tmp_path / "sync"), accumulation_steps=2, start_step=3, **shape)
    first.progress(lambda p: p.step > 10)
    stop(first, second)
    told = [event.progress for event in first.events if isinstance(event, ProgressEvent) and event.progress.loss][:3]
    assert told
    alone = losses_of_one_rank(tmp_path / "corpus.txt", shape, start_step=3, until_step=told[-1].step)
    for each in told:
        assert each.tokens == 2 * 16 * 64 * (each.step - 3)
        assert each.loss == pytest.approx(alone[each.step], rel=1e-3)


def test_the_loss_falls_and_tokens_are_those_of_both(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    first, second = pair(serve(tmp_path / "sync", quorum=1))
    begin = first.progress(lambda p: p.step > 5)
    end = first.progress(lambda p: p.step > begin.step + 100)
    assert end.tokens == 64 * end.step
    assert begin.loss is not None
    assert end.loss is not None
    assert end.loss < begin.loss
    # Only the first speaks.
    assert not any(isinstance(event, ProgressEvent | ReadyEvent) for event in second.events)
    stop(first, second)


def test_a_rank_says_that_the_other_is_lost(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    first, second = pair(serve(tmp_path / "sync", quorum=1))
    first.progress(lambda p: p.step > 5)
    first.process.kill()
    failure = second.wait_for(FailedEvent)
    assert failure.message.startswith("group: ")
    assert failure.exit_code == second.finish() == 3


def test_a_rank_that_waits_for_the_others_stops_at_once(
    serve: Serve,
    start: Start,
    store_url: str,
    tmp_path: Path,
) -> None:
    place = GroupPlace(store_url=store_url, store_token=SecretStr("any"), name="slot-0", epoch=1, timeout_s=600)
    alone = start(serve(tmp_path / "sync"), rank=0, num_ranks=2, group=place)
    alone.wait_for(ProgressEvent)
    alone.send(StopCommand())
    assert alone.finish(DEADLINE_S) == 0
