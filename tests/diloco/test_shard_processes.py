"""Several synchronizers and islands as real processes: what they make together, and what the death of one costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from diloco.protocol import FailedEvent, ReadyEvent
from diloco.schema import OuterState, SyncOutcome, SyncReport
from diloco.transport import SynchronizerClient
from tests.diloco.conftest import wait_until
from tests.diloco.shard_island import IslandProcess
from tests.diloco.test_worker import WorkerUnderTest, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

__all__ = ["start"]

NUM_FRAGMENTS = 4
NUM_ROUNDS = 10

Spawn = Callable[..., Any]
Connect = Callable[[str], SynchronizerClient]
Start = Callable[..., WorkerUnderTest]


@pytest.fixture
def islands() -> Iterator[list[IslandProcess]]:
    running = [IslandProcess(slot) for slot in range(2)]
    yield running
    for island in running:
        island.close()


def join_all(islands: list[IslandProcess], *urls: str, codec: str = "fp32") -> None:
    """One after another: the run begins with the first one's parameters, which the second does not have."""
    for island in islands:
        island.join(list(urls), num_fragments=NUM_FRAGMENTS, codec=codec)


def spawn_shards(spawn: Spawn, directory: Path, *options: str) -> list[Any]:
    return [
        spawn(directory / f"shard-{index}", "--shard", f"{index}/2", "--quorum", "2", *options) for index in range(2)
    ]


def state_of(url: str) -> OuterState:
    return OuterState.model_validate_json(httpx.get(f"{url}/v1/state", timeout=10, trust_env=False).content)


def slots_of(url: str, fragment: int) -> tuple[int, ...]:
    return next(one.open_round.slots for one in state_of(url).fragments if one.fragment == fragment)


def run_round(members: list[IslandProcess], number: int | None, **how: Any) -> list[SyncReport]:
    for member in members:
        member.begin(number, **how)
    return [member.report() for member in members]


def assert_applied(reports: list[SyncReport], number: int) -> None:
    assert [(report.outcome, report.round) for report in reports] == [(SyncOutcome.APPLIED, number)] * len(reports)


@pytest.mark.parametrize(("codec", "pull"), [("fp32", "fp32"), ("int4", "int8")])
def test_two_synchronizers_make_what_one_makes_bit_for_bit_through_the_death_of_each(
    spawn: Spawn, islands: list[IslandProcess], tmp_path: Path, codec: str, pull: str
) -> None:
    alone = spawn(tmp_path / "alone", "--quorum", "2", "--pull-codec", pull)
    join_all(islands, alone.url, codec=codec)
    for number in range(NUM_ROUNDS):
        assert_applied(run_round(islands, number), number)
    expected = [island.parameters() for island in islands]

    shards = spawn_shards(spawn, tmp_path, "--pull-codec", pull)
    join_all(islands, *(shard.url for shard in shards), codec=codec)
    for number in range(NUM_ROUNDS):
        own = shards[number % 2]
        if number in (3, 6):
            # One contribution is in when the synchronizer dies: it counts all the same.
            islands[0].begin(number)
            wait_until(lambda: slots_of(own.url, number % NUM_FRAGMENTS) == (0,))  # noqa: B023
            own.kill()
            own.start()
            islands[1].begin(number)
            assert_applied([island.report() for island in islands], number)
        else:
            assert_applied(run_round(islands, number), number)
    for (expected_global, expected_local), island in zip(expected, islands, strict=True):
        found_global, found_local = island.parameters()
        assert torch.equal(found_global, expected_global)
        assert torch.equal(found_local, expected_local)
    versions = {one.fragment: one.version for shard in shards for one in state_of(shard.url).fragments}
    assert versions == {0: 3, 1: 3, 2: 2, 3: 2}


def test_the_fragments_of_one_that_stays_dead_are_passed_over_until_it_is_back(
    spawn: Spawn, islands: list[IslandProcess], tmp_path: Path
) -> None:
    shards = spawn_shards(spawn, tmp_path)
    urls = [shard.url for shard in shards]
    join_all(islands, *urls)
    assert_applied(run_round(islands, 0), 0)
    shards[1].kill()
    for taken in (2, 4):
        reports = run_round(islands, 1, wait_s=12.0)
        assert_applied(reports, taken)
        assert all(urls[1] in report.detail for report in reports)
    shards[1].start()
    for number in (1, 3, 5, 6):
        assert_applied(run_round(islands, number), number)
    first, second = (island.parameters()[0] for island in islands)
    assert torch.equal(first, second)


def test_workers_sync_with_two_synchronizers_and_one_of_them_alone_is_refused(
    spawn: Spawn, start: Start, tmp_path: Path
) -> None:
    urls = [spawn(tmp_path / f"s{index}", "--shard", f"{index}/2").url for index in range(2)]
    worker = start(",".join(urls), num_fragments=NUM_FRAGMENTS)
    ready = worker.wait_for(ReadyEvent)
    assert (ready.version, ready.num_fragments) == (0, NUM_FRAGMENTS)
    worker.progress(lambda p: p.step > 3)
    for number in range(5):
        report = worker.sync(number)
        assert (report.outcome, report.round) == (SyncOutcome.APPLIED, number)
    worker.close()
    again = start(",".join(urls), start_step=100, start_tokens=6400)
    assert again.wait_for(ReadyEvent).version == 5
    again.close()
    for url, said in ((urls[0], "is shard 0/2"), (",".join(reversed(urls)), "in the order of their --shard")):
        refused = start(url, slot=1)
        failed = refused.wait_for(FailedEvent)
        assert said in failed.message
        assert refused.finish() == failed.exit_code != 0
