"""Fragments that sync beside inner steps, and that are pulled as deltas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.boundary import StepBoundary
from diloco.codec import CODECS
from diloco.protocol import SyncCommand
from diloco.schema import CodecName, SyncOutcome, SyncReport
from diloco.transport import SynchronizerClient
from tests.diloco.conftest import wait_until
from tests.diloco.test_streaming import NUM_FRAGMENTS, PLAIN_AVERAGE, SIZE, Member, contribute, global_at

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


class Trainer(Member):
    """Its syncs run on a thread of their own; the test takes the inner steps."""

    def __init__(self, client: SynchronizerClient, *, slot: int = 0) -> None:
        super().__init__(client, slot=slot)
        self.stop = threading.Event()
        self.boundary = StepBoundary(self.stop)
        self.transfers = ThreadPoolExecutor(1)

    def start_sync(self, round_number: int | None) -> Future[SyncReport | None]:
        command = SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + 30, overlap=True)
        captured = self.exchange.capture(command)
        return self.transfers.submit(lambda: self.exchange.run(command, captured=captured, at_boundary=self.boundary))

    def end_sync(self, sync: Future[SyncReport | None]) -> SyncReport:
        while not sync.done():
            wait_until(lambda: self.boundary.is_waiting or sync.done())
            self.boundary.serve()
        report = sync.result()
        assert report is not None
        return report

    def close(self) -> None:
        self.stop.set()
        self.transfers.shutdown()


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    found: list[Trainer] = []
    yield found
    for trainer in found:
        trainer.close()


def changed(before: Tensor, after: Tensor) -> list[bool]:
    return [
        not torch.equal(a, b)
        for a, b in zip(torch.split(before, [4, 5, 6]), torch.split(after, [4, 5, 6]), strict=True)
    ]


def test_steps_taken_while_a_fragment_syncs_are_kept_in_all_fragments(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    trainers.append(trainer := Trainer(connect(url)))
    other = connect(url)
    for number in range(2 * NUM_FRAGMENTS):
        fragment, version = number % NUM_FRAGMENTS, number // NUM_FRAGMENTS
        trainer.train(1.0)
        sync = trainer.start_sync(number)
        trainer.train(0.5)
        wait_until(lambda f=fragment: other.state(deadline_s=time.time() + 30).fragments[f].open_round.slots == (0,))  # type: ignore[misc]
        before = trainer.local
        contribute(other, 100.0, fragment=fragment, version=version, slot=1)
        report = trainer.end_sync(sync)
        assert (report.outcome, report.round) == (SyncOutcome.APPLIED, number)
        assert changed(before, trainer.local) == [index == fragment for index in range(NUM_FRAGMENTS)]
        own = trainer.island.fragments[fragment]
        # What was captured is in the round; the step since then is not, and is kept.
        assert torch.allclose(torch.split(trainer.local, [4, 5, 6])[fragment], own.global_flat + 0.5)
        assert own.steps_since_sync == 1


def test_the_fragment_that_was_captured_gives_way_to_the_one_whose_turn_it_is(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    trainers.append(trainer := Trainer(connect(url)))
    trainer.train(2.0)
    contribute(connect(url), 50.0, fragment=0, version=0, slot=1)
    assert connect(url).wait_version(0, deadline_s=time.time() + 30) == 1
    report = trainer.end_sync(trainer.start_sync(1))
    assert (report.outcome, report.round, report.bytes_pushed) == (SyncOutcome.APPLIED, 1, 4 * 5)
    assert torch.allclose(trainer.local[:4], torch.full((4,), 52.0))
    assert torch.allclose(trainer.local[4:9], torch.arange(4.0, 9.0) + 2.0)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_fragments_pulled_as_deltas_are_the_same_on_all_islands(
    serve: Serve, connect: Connect, tmp_path: Path, codec: CodecName
) -> None:
    url = serve(tmp_path, quorum=2, outer_lr=0.7, outer_momentum=0.9, grace_max_s=0.0, pull_codec=codec)
    members = [Member(connect(url), slot=slot, codec=codec) for slot in range(2)]
    for number in range(2 * NUM_FRAGMENTS):
        for member in members:
            member.train(0.1 * (member.slot + 1))
        pending = members[0].begin(number)
        report = members[1].sync(number)
        members[0].end(pending)
        size = 4 + number % NUM_FRAGMENTS
        assert report.bytes_pulled == CODECS[codec].num_bytes(size)
    first, second = (member.island.global_flat for member in members)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert torch.equal(first, global_at(members[0].client))
    assert first.numel() == SIZE
