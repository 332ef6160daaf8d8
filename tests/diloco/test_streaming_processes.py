"""Fragments across real processes: synchronizers that are killed in the middle of rounds, workers that sync in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.protocol import FailedEvent, PauseCommand, ReadyEvent, SyncCommand, SyncedEvent
from diloco.schema import CHUNK_BYTES, Manifest, OuterState, Phase, SyncOutcome, TensorSpec
from diloco.transport import SynchronizerClient
from diloco.turns import next_round, place_of
from tests.diloco.conftest import wait_until
from tests.diloco.test_worker import WorkerUnderTest, start

pytestmark = pytest.mark.integration

__all__ = ["start"]

NUM_FRAGMENTS = 3
SIZE = CHUNK_BYTES // 2
"""Elements of a tensor of two chunks."""
MANIFEST = Manifest(tensors=tuple(TensorSpec(name=name, shape=(SIZE,), dtype="float32") for name in "abc"))
DEADLINE_S = 60.0

Spawn = Callable[..., Any]
Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]
Start = Callable[..., WorkerUnderTest]


def soon() -> float:
    return time.time() + DEADLINE_S


def state_of(client: SynchronizerClient) -> OuterState:
    return client.state(deadline_s=soon())


def slots_of(client: SynchronizerClient) -> list[tuple[int, ...]]:
    return [fragment.open_round.slots for fragment in state_of(client).fragments]


def begin(client: SynchronizerClient) -> None:
    flat = torch.randn(3 * SIZE, generator=torch.Generator().manual_seed(0))
    assert client.init(MANIFEST, flat, deadline_s=soon(), num_fragments=NUM_FRAGMENTS).accepted


def push(client: SynchronizerClient, number: int, *, slot: int) -> None:
    place = place_of(number, NUM_FRAGMENTS)
    local = torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * number + slot + 1))
    reply = client.of(place.fragment).push(local, round=place.version, slot=slot, epoch=1, tokens=7, deadline_s=soon())
    assert reply.complete


def await_end(client: SynchronizerClient, number: int) -> None:
    place = place_of(number, NUM_FRAGMENTS)
    assert client.of(place.fragment).wait_version(place.version, deadline_s=soon()) == place.version + 1


def pulled(client: SynchronizerClient) -> Tensor:
    flats = torch.empty(NUM_FRAGMENTS, SIZE)
    for fragment, flat in zip(state_of(client).fragments, flats, strict=True):
        client.of(fragment.fragment).pull(fragment.version, flat, deadline_s=soon())
    return flats


def undisturbed(client: SynchronizerClient, num_rounds: int) -> Tensor:
    begin(client)
    for number in range(num_rounds):
        for slot in (1, 0):
            push(client, number, slot=slot)
        await_end(client, number)
    return pulled(client)


def test_kill_9_in_the_middle_of_the_rounds_of_all_fragments_changes_no_result(
    spawn: Spawn, connect: Connect, tmp_path: Path
) -> None:
    expected = undisturbed(connect(spawn(tmp_path / "undisturbed", "--quorum", "2").url), 6)
    process = spawn(tmp_path / "killed", "--quorum", "2")
    client = connect(process.url)
    begin(client)
    for cycle in range(2):
        numbers = range(cycle * NUM_FRAGMENTS, (cycle + 1) * NUM_FRAGMENTS)
        for number in numbers:
            push(client, number, slot=0)
        process.kill()
        process.start()
        assert slots_of(client) == [(0,)] * NUM_FRAGMENTS
        for number in numbers:
            push(client, number, slot=1)
            await_end(client, number)
    assert torch.equal(pulled(client).view(torch.int32), expected.view(torch.int32))


def test_an_upload_to_one_fragment_survives_the_outer_step_of_another(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    client = connect(serve(tmp_path, quorum=1, grace_max_s=0.0))
    begin(client)

    class Interrupted(SynchronizerClient):
        """Between its two chunks another fragment takes its step."""

        def _request(self, method: str, path: str, **arguments: Any) -> Any:
            if method == "PUT" and "bytes 0-" not in arguments["headers"]["Content-Range"]:
                sent.append(path)
                push(client, 0, slot=0)
                await_end(client, 0)
            return super()._request(method, path, **arguments)

    sent: list[str] = []
    push(Interrupted(client._http), 1, slot=0)
    assert len(sent) == 1, "no chunk was sent twice"
    await_end(client, 1)
    assert [fragment.version for fragment in state_of(client).fragments] == [1, 1, 0]


def test_workers_sync_in_turn_through_the_death_of_the_synchronizer_and_end_equal(
    spawn: Spawn,
    connect: Connect,
    start: Start,
    tmp_path: Path,
) -> None:
    process = spawn(tmp_path / "sync", "--quorum", "2")
    client = connect(process.url)
    workers = [start(process.url, slot=slot, num_fragments=NUM_FRAGMENTS) for slot in range(2)]
    for worker in workers:
        ready = worker.wait_for(ReadyEvent)
        assert (ready.version, ready.num_fragments) == (0, NUM_FRAGMENTS)

    def run_round(number: int, *, dies: bool = False) -> list[float | None]:
        seen = [len(worker.events) for worker in workers]
        order = SyncCommand(round=number, epoch=1, deadline_s=soon())
        workers[0].send(order)
        if dies:
            fragment = place_of(number, NUM_FRAGMENTS).fragment
            wait_until(lambda: slots_of(client)[fragment] == (0,))
            process.kill()
            process.start()
            assert slots_of(client)[fragment] == (0,)
        workers[1].send(order)
        reports = [
            worker.wait_for(SyncedEvent, after=before).report for worker, before in zip(workers, seen, strict=True)
        ]
        assert [(report.outcome, report.round) for report in reports] == [(SyncOutcome.APPLIED, number)] * 2
        return [report.update_norm for report in reports]

    for number in range(5):
        for worker in workers:
            worker.progress(lambda p, n=number: p.round == n and p.inner_steps_since_sync > 3)  # type: ignore[misc]
        run_round(number, dies=number in (1, 3))
    for worker in workers:
        worker.progress(lambda p: p.round == 5 and p.inner_steps_since_sync > 0)
        worker.send(PauseCommand())
        worker.progress(lambda p: p.phase is Phase.PAUSED)
    for number in range(5, 5 + NUM_FRAGMENTS):
        norms = run_round(number)
        assert all(norm is not None and norm > 0 for norm in norms), "there was progress until the pause"
    # Nothing was trained since: what each worker has is what it adopted, whose digest it checked.
    for number in range(5 + NUM_FRAGMENTS, 5 + 2 * NUM_FRAGMENTS):
        assert run_round(number) == [0.0, 0.0]
    assert next_round(fragment.version for fragment in state_of(client).fragments) == 11


def test_a_worker_that_takes_a_slot_over_goes_on_with_the_next_fragment(
    serve: Serve,
    connect: Connect,
    start: Start,
    tmp_path: Path,
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    first = start(url, num_fragments=NUM_FRAGMENTS)
    first.progress(lambda p: p.phase is Phase.INNER and p.step > 3)
    for number in range(4):
        assert first.sync(None).round == number
    first.close()
    second = start(url, start_step=100, start_tokens=6400)
    ready = second.wait_for(ReadyEvent)
    assert (ready.version, ready.num_fragments) == (4, NUM_FRAGMENTS)
    assert second.sync(4).outcome is SyncOutcome.APPLIED
    assert [fragment.version for fragment in state_of(connect(url)).fragments] == [2, 2, 1]


def test_a_worker_that_overlaps_adopts_one_fragment_while_it_trains_all(
    serve: Serve,
    connect: Connect,
    start: Start,
    tmp_path: Path,
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    worker = start(url, num_fragments=NUM_FRAGMENTS)
    worker.progress(lambda p: p.phase is Phase.INNER and p.step > 3)
    client = connect(url)
    seen = len(worker.events)
    worker.send(SyncCommand(round=0, epoch=1, deadline_s=soon(), overlap=True))
    wait_until(lambda: slots_of(client)[0] == (0,))
    begun = worker.progress(lambda p: p.phase is Phase.INNER)
    worker.progress(lambda p: p.step > begun.step + 5)
    size = state_of(client).fragments[0].num_bytes // 4
    client.push(torch.zeros(size), round=0, slot=1, epoch=1, tokens=10, deadline_s=soon())
    report = worker.wait_for(SyncedEvent, after=seen).report
    assert (report.outcome, report.round, report.bytes_pushed) == (SyncOutcome.APPLIED, 0, 4 * size)
    after = worker.progress(lambda p: p.round == 1)
    assert 0 < after.inner_steps_since_sync < after.step


def test_a_worker_with_other_fragments_than_the_run_ends_and_says_why(
    serve: Serve,
    start: Start,
    tmp_path: Path,
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    start(url, num_fragments=NUM_FRAGMENTS).wait_for(ReadyEvent)
    other = start(url, slot=1, num_fragments=2)
    failed = other.wait_for(FailedEvent)
    assert "it has 3 fragments against 2 here" in failed.message
    assert other.finish() == failed.exit_code == 4
