"""Syncs beside inner steps: the module is touched between two of them alone, whatever becomes of the round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.boundary import StepBoundary
from diloco.codec import CODECS
from diloco.exchange import Exchange
from diloco.fragment import flatten_module, unflatten_into
from diloco.island import Island
from diloco.protocol import SyncCommand
from diloco.schema import CodecName, SyncOutcome, SyncReport
from diloco.transport import SynchronizerClient
from tests.diloco.conftest import wait_until

SIZE = 130
PLAIN_AVERAGE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "grace_max_s": 0.0}

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def soon() -> float:
    return time.time() + 30


class Trainer:
    """An island whose syncs run on a thread of their own; the test takes the inner steps."""

    def __init__(self, client: SynchronizerClient, codec: CodecName = "fp32", *, slot: int = 0) -> None:
        module = nn.Linear(SIZE - 1, 1)
        unflatten_into(torch.zeros(SIZE), module)
        self.island = Island(module, CODECS[codec])
        self.stop = threading.Event()
        self.boundary = StepBoundary(self.stop)
        self.exchange = Exchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=soon())
        self._transfers = ThreadPoolExecutor(1)
        self.served = 0

    @property
    def local(self) -> Tensor:
        return flatten_module(self.island.module)

    def train(self, change: float) -> None:
        """One inner step: the module is as the last one left it."""
        unflatten_into(self.local + change, self.island.module)
        self.island.count_step(10)

    def begin(self, round_number: int | None, *, wait_s: float = 30.0) -> Future[SyncReport | None]:
        command = SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + wait_s, overlap=True)
        captured = self.exchange.capture()
        return self._transfers.submit(lambda: self.exchange.run(command, captured=captured, at_boundary=self.boundary))

    def end(self, sync: Future[SyncReport | None]) -> SyncReport | None:
        while not sync.done():
            before = self.local
            wait_until(lambda: self.boundary.is_waiting or sync.done())
            assert torch.equal(self.local, before) or self.local.isnan().any()
            self.served += self.boundary.is_waiting
            self.boundary.serve()
            wait_until(lambda: not self.boundary.is_waiting)
        return sync.result()

    def close(self) -> None:
        self.stop.set()
        self._transfers.shutdown()


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    found: list[Trainer] = []
    yield found
    for trainer in found:
        trainer.close()


def contribute(client: SynchronizerClient, value: float, *, round_number: int, slot: int = 1) -> None:
    """What another island would do."""
    client.push(torch.full((SIZE,), value), round=round_number, slot=slot, epoch=0, tokens=10, deadline_s=soon())


def slots(client: SynchronizerClient) -> tuple[int, ...]:
    return client.state(deadline_s=soon()).fragments[0].open_round.slots


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_was_captured_is_contributed_and_later_steps_are_kept(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer], codec: CodecName
) -> None:
    client = connect(serve(tmp_path, quorum=2, **PLAIN_AVERAGE))
    trainers.append(trainer := Trainer(client, codec))
    trainer.train(2.0)
    sync = trainer.begin(0)
    trainer.train(0.5)
    other = connect(str(client._http.base_url))
    wait_until(lambda: slots(other) == (0,))
    assert not trainer.boundary.is_waiting
    trainer.train(0.25)
    contribute(other, 0.0, round_number=0)
    report = trainer.end(sync)
    assert report is not None
    assert (report.outcome, report.inner_steps, report.tokens) == (SyncOutcome.APPLIED, 1, 10)
    assert report.update_norm == pytest.approx(2.0 * SIZE**0.5)
    assert trainer.served == 1
    torch.testing.assert_close(trainer.island.global_flat, torch.full((SIZE,), 1.0), rtol=0.01, atol=0)
    torch.testing.assert_close(trainer.local - trainer.island.global_flat, torch.full((SIZE,), 0.75))
    assert (trainer.island.version, trainer.island.steps_since_sync) == (1, 2)


def test_an_island_that_is_behind_catches_up_and_contributes_what_it_then_has(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    client = connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE))
    trainers.append(trainer := Trainer(client))
    contribute(client, 8.0, round_number=0)
    assert client.wait_version(0, deadline_s=soon()) == 1
    trainer.train(2.0)
    sync = trainer.begin(1)
    wait_until(lambda: trainer.boundary.is_waiting)
    trainer.train(0.5)
    report = trainer.end(sync)
    assert report is not None
    assert (report.outcome, report.round, report.inner_steps) == (SyncOutcome.APPLIED, 1, 2)
    assert trainer.served == 3  # to catch up, to copy, to adopt
    torch.testing.assert_close(trainer.local, torch.full((SIZE,), 10.5))
    assert (trainer.island.version, trainer.island.steps_since_sync) == (2, 0)


def test_a_round_that_closed_meanwhile_is_adopted_with_all_progress_kept(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)

    class Overtaken(SynchronizerClient):
        """Another island closes the round between our look at the state and our push."""

        def push(self, *arguments: Any, **keywords: Any) -> Any:
            contribute(connect(url), 8.0, round_number=0)
            connect(url).wait_version(0, deadline_s=soon())
            return super().push(*arguments, **keywords)

    trainers.append(trainer := Trainer(Overtaken(connect(url)._http)))
    trainer.train(2.0)
    sync = trainer.begin(0)
    trainer.train(0.5)
    report = trainer.end(sync)
    assert report is not None
    assert report.outcome is SyncOutcome.LATE
    torch.testing.assert_close(trainer.local, torch.full((SIZE,), 10.5))
    assert (trainer.island.version, trainer.island.steps_since_sync) == (1, 2)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_progress_that_turns_out_not_to_be_finite_is_given_up_with_the_steps_after_it(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer], codec: CodecName
) -> None:
    client = connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE))
    trainers.append(trainer := Trainer(client, codec))
    trainer.train(float("nan"))
    sync = trainer.begin(0)
    trainer.train(1.0)
    report = trainer.end(sync)
    assert report is not None
    assert report.outcome is SyncOutcome.FAILED
    assert "not finite" in report.detail
    assert not trainer.local.any()
    assert trainer.island.steps_since_sync == 0
    assert slots(connect(str(client._http.base_url))) == ()


def test_a_sync_that_fails_leaves_the_inner_steps_alone(
    spawn: Callable[..., Any], connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    synchronizer = spawn(tmp_path, "--quorum", "2", "--outer-lr", "1", "--outer-momentum", "0")
    trainers.append(trainer := Trainer(connect(synchronizer.url)))
    trainer.train(2.0)
    sync = trainer.begin(0, wait_s=3.0)
    synchronizer.kill()
    trainer.train(0.5)
    report = trainer.end(sync)
    assert report is not None
    assert report.outcome is SyncOutcome.FAILED
    assert trainer.served == 0
    assert torch.equal(trainer.local, torch.full((SIZE,), 2.5))
    assert (trainer.island.version, trainer.island.steps_since_sync) == (0, 2)


def test_a_stop_ends_a_sync_that_waits_for_a_boundary(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    client = connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE))
    trainers.append(trainer := Trainer(client))
    trainer.train(2.0)
    sync = trainer.begin(0)
    wait_until(lambda: trainer.boundary.is_waiting)
    trainer.stop.set()
    report = sync.result(timeout=30)
    assert report is not None
    assert (report.outcome, trainer.island.version) == (SyncOutcome.FAILED, 0)
    assert torch.equal(trainer.local, torch.full((SIZE,), 2.0))


def memory_of(island: Island) -> set[int]:
    """Addresses of all that an island holds for its syncs."""
    tensors = [island.global_flat, island.incoming]
    for workspace in island._workspaces:
        tensors += [workspace.local, workspace.left_out, workspace.payload]
    if island.feedback is not None:
        tensors.append(island.feedback.residual)
    return {tensor.data_ptr() for tensor in tensors if tensor.numel()}


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_memory_is_used_again_from_sync_to_sync(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer], codec: CodecName
) -> None:
    client = connect(serve(tmp_path, quorum=1, pull_codec="int4", **PLAIN_AVERAGE))
    trainers.append(trainer := Trainer(client, codec))
    seen: set[int] = set()
    for number in range(5):
        trainer.train(0.1 * number)
        report = trainer.end(trainer.begin(number))
        assert report is not None
        assert report.outcome is SyncOutcome.APPLIED
        seen = seen or memory_of(trainer.island)
        assert memory_of(trainer.island) == seen
    assert len(seen) == (3 if codec == "fp32" else 6)


def test_a_contribution_whose_fate_is_open_keeps_its_memory(
    serve: Serve, connect: Connect, tmp_path: Path, trainers: list[Trainer]
) -> None:
    class Impatient(SynchronizerClient):
        """Its deadline is over as soon as it has contributed."""

        def wait_version(self, after: int, *, deadline_s: float) -> int | None:
            return None

    client = connect(serve(tmp_path, quorum=2, **PLAIN_AVERAGE))
    trainers.append(trainer := Trainer(Impatient(client._http), "int4"))
    for number in range(4):
        trainer.train(1.0)
        report = trainer.end(trainer.begin(0))
        assert report is not None
        assert (report.outcome, report.inner_steps) == (SyncOutcome.FAILED, number + 1)
        accepted = trainer.island.accepted
        assert accepted is not None
        assert torch.equal(accepted.local, torch.full((SIZE,), number + 1.0))
    assert len(trainer.island._workspaces) == 2
