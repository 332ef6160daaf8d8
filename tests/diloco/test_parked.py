"""A parked worker builds its model, keeps global parameters new, and trains in a slot as if it had started with it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.parked import Built, has_news, pull
from diloco.parked_config import ParkedConfig
from diloco.protocol import FailedEvent, ParkedEvent, ReadyEvent, StopCommand, SyncCommand, SyncedEvent, WorkerConfig
from diloco.schema import FragmentState, RoundState
from diloco.shards import Shards
from diloco.streaming import StreamingIsland
from diloco.transport import SynchronizerClient
from diloco.worker_build import build
from service.errors import InputError
from tests.diloco.test_worker import Serve, WorkerUnderTest
from tests.diloco.worker_configs import tiny_config, write_corpus

pytestmark = pytest.mark.integration


class ParkedUnderTest(WorkerUnderTest):
    """A worker that is parked first."""

    def __init__(self, config: WorkerConfig, *, refresh_s: float = 0.2) -> None:
        self._parked = ParkedConfig(config=config, refresh_s=refresh_s)
        super().__init__(config)

    def _write(self, line: str) -> None:
        if self._is_first:
            self._is_first = False
            line = self._parked.model_dump_json()
        super()._write(line)

    _is_first = True

    def take_slot(self, config: WorkerConfig) -> None:
        self._write(config.model_dump_json())


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return tiny_config(write_corpus(tmp_path), "http://127.0.0.1:9")


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Ends a worker with the test."""
    running: list[WorkerUnderTest] = []

    def add(worker: WorkerUnderTest) -> WorkerUnderTest:
        running.append(worker)
        return worker

    yield add
    for worker in running:
        worker.close()


def digest_after_sync(worker: WorkerUnderTest, client: SynchronizerClient, *, at_step: int) -> str:
    """Of the global parameters, once the worker's steps up to this one are in them."""
    worker.send(SyncCommand(round=0, epoch=1, at_step=at_step, deadline_s=_soon()))
    assert worker.wait_for(SyncedEvent).report.outcome == "applied"
    return client.state(deadline_s=_soon()).fragments[0].digest


def test_a_parked_worker_that_gets_a_slot_trains_as_one_that_started_with_it(
    serve: Serve,
    connect: Callable[[str], SynchronizerClient],
    tmp_path: Path,
    config: WorkerConfig,
    keep: Callable[[Any], Any],
) -> None:
    digests = []
    for name in ("plain", "parked"):
        url = serve(tmp_path / name, quorum=1)
        client = connect(url)
        of_run = build(config.model_copy(update={"seed": 3})).island
        assert client.offer(of_run.manifest, of_run.global_flat, deadline_s=_soon()).accepted
        mine = config.model_copy(update={"synchronizer_url": url, "slot": 1, "start_step": 40})
        if name == "plain":
            worker = keep(WorkerUnderTest(mine))
        else:
            worker = keep(ParkedUnderTest(mine.model_copy(update={"slot": 0, "start_step": 0})))
            worker.wait_for(ParkedEvent, lambda event: event.versions == (0,))
            worker.take_slot(mine)
        assert worker.wait_for(ReadyEvent).version == 0
        digests.append(digest_after_sync(worker, client, at_step=60))
    assert digests[0] == digests[1]


def test_a_parked_worker_follows_the_run(serve: Serve, config: WorkerConfig, keep: Any, tmp_path: Path) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    config = config.model_copy(update={"synchronizer_url": url})
    parked = keep(ParkedUnderTest(config))
    parked.wait_for(ParkedEvent, lambda event: event.versions == ())
    worker = keep(WorkerUnderTest(config))
    for version in (0, 1, 2):
        parked.wait_for(ParkedEvent, lambda event, now=version: event.versions == (now,))
        assert worker.sync(version).outcome == "applied"


def test_what_is_held_is_not_pulled_again_and_what_is_old_is(
    serve: Serve, connect: Callable[[str], SynchronizerClient], tmp_path: Path, config: WorkerConfig
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    client = connect(url)
    built = build(config)
    shards = Shards((client,))
    assert not has_news(built, shards, deadline_s=_soon())  # no run has begun
    assert built.held == {}
    other = StreamingIsland(build(config.model_copy(update={"seed": 7})).module, num_fragments=2)
    assert client.offer(other.manifest, other.global_flat, deadline_s=_soon(), num_fragments=2).accepted
    before = client.bytes_pulled
    assert has_news(built, shards, deadline_s=_soon())
    assert client.bytes_pulled == before
    pull(built, shards, deadline_s=_soon())
    assert sorted(built.held) == [0, 1]
    assert torch.equal(built.island.global_flat, other.global_flat)
    pulled = client.bytes_pulled - before
    assert not has_news(built, shards, deadline_s=_soon())
    assert client.bytes_pulled - before == pulled
    built.held[1] = (0, "another run's")
    assert has_news(built, shards, deadline_s=_soon())


def _soon() -> float:
    return time.time() + 60


def test_what_is_held_of_a_model_that_was_cut_otherwise_does_not_count(config: WorkerConfig) -> None:
    built = build(config)
    assert isinstance(built, Built)
    built.held = {0: (0, "a"), 1: (0, "b")}
    its = FragmentState(
        fragment=0,
        version=0,
        num_bytes=4,
        digest="a",
        open_round=RoundState(round=0, opened_s=None, slots=(), quorum=1, closes_at_s=None),
    )
    assert not built.holds(0, its)
    built.island.cut(2)
    assert built.holds(0, its)
    assert not built.holds(1, its)


@pytest.mark.parametrize("how", ["hang up", "stop"])
def test_a_parked_worker_ends_when_nobody_needs_it(config: WorkerConfig, keep: Callable[[Any], Any], how: str) -> None:
    parked = keep(ParkedUnderTest(config))
    parked.wait_for(ParkedEvent)
    if how == "stop":
        parked.send(StopCommand())
    else:
        parked.hang_up()
    assert parked.finish(60) == 0


def test_a_slot_that_is_none_is_refused_with_a_word(config: WorkerConfig, keep: Callable[[Any], Any]) -> None:
    parked = keep(ParkedUnderTest(config))
    parked.wait_for(ParkedEvent)
    parked._write('{"slot": -1}')
    assert parked.finish(60) == InputError.exit_code
    assert re.search("worker configuration", parked.wait_for(FailedEvent).message)
