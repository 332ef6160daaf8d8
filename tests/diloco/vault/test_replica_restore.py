"""A worker on another host that goes on from a replica ends with the weights of one that nobody disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.agent.replica_fetch import ReplicaFetcher
from diloco.agent.replica_sender import ReplicaSender, Source
from diloco.protocol import PauseCommand, ProgressEvent, RestoredEvent
from diloco.recovery_schema import ReplicaPlace
from diloco.schema import Phase, Rung
from diloco.vault.file import VaultFile
from tests.diloco.agent.replicas import Keeper, network
from tests.diloco.vault.conftest import Slot, StartSlot, until_version
from tests.diloco.vault.test_kill import VARIANTS, Serve, begun, undisturbed

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
SYNCS = (1500, 3000, 4500)
"""Inner steps so far apart that a replica is made, and its island killed, well before the next sync."""


class Hosts:
    """The vaults of other hosts, to which the state of one slot goes and on which it is taken."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._taken: list[VaultFile] = []

    def replicate(self, slot: Slot) -> Keeper:
        """Send the newest generation to a host, over HTTP."""
        self._number += 1
        keeper = Keeper(self._directory / f"host-{self._number}", f"host-{self._number}")
        keeper.store.run_id = None  # nobody leads this run

        async def send() -> None:
            async with network(keeper, close=False) as http:
                sender = ReplicaSender(http, lambda: Source(epoch=1, paths=(slot.path,)), timeout_s=TIMEOUT_S)
                assert await sender.send_newest(keeper.peer, at_least=1, deadline_s=time.monotonic() + TIMEOUT_S)

        asyncio.run(send())
        return keeper

    def take_over(self, slot: Slot, keeper: Keeper) -> RestoredEvent:
        """Fetch the state to yet another host, and start a worker there."""
        self._number += 1
        taker = Keeper(self._directory / f"host-{self._number}", f"host-{self._number}")
        taker.store.run_id = None
        places = [ReplicaPlace(holder=keeper.peer, replica=notice) for notice in keeper.store.notices()]

        async def fetch() -> Path:
            async with network(keeper, taker) as http:
                fetcher = ReplicaFetcher(http, taker.store, own_id="taker", timeout_s=TIMEOUT_S)
                found = await fetcher.obtain(0, 1, places, epoch=2, refused=[])
                assert found is not None
                return found.paths[0]

        slot.path = asyncio.run(fetch())
        self._taken.append(slot.vault)
        slot._vault = VaultFile.adopt(slot.path)
        return slot.restart(is_own=False, instance="another", epoch=2)

    def close(self) -> None:
        for vault in self._taken:
            vault.close(remove=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path / "hosts")
    yield found
    found.close()


@pytest.mark.parametrize("variant", ["blocking", "int4-fragments-overlapped"])
def test_taken_over_after_a_kill_it_ends_with_the_same_weights(
    serve: Serve, start_slot: StartSlot, hosts: Hosts, tmp_path: Path, variant: str
) -> None:
    options = VARIANTS[variant]
    wanted = undisturbed(start_slot, serve(tmp_path / "one", quorum=1), steps=SYNCS, **options)
    url = serve(tmp_path / "two", quorum=1)
    slot = begun(start_slot, url, steps=SYNCS, **options)
    for step in (20, SYNCS[0] + 20, SYNCS[1] + 20):
        slot.until_step(step)
        keeper = hosts.replicate(slot)
        (replicated,) = [notice.step for notice in keeper.store.notices()]
        slot.until_step(replicated + 20)  # what is not replicated is computed again
        slot.kill()
        restored = hosts.take_over(slot, keeper)
        assert (restored.rung, restored.step, restored.lost) == (Rung.VAULT, replicated, ""), restored.refused
    assert until_version(url, len(SYNCS)) == wanted


def test_handed_over_as_planned_it_loses_no_step_and_ends_with_the_same_weights(
    serve: Serve, start_slot: StartSlot, hosts: Hosts, tmp_path: Path
) -> None:
    wanted = undisturbed(start_slot, serve(tmp_path / "one", quorum=1), steps=SYNCS)
    url = serve(tmp_path / "two", quorum=1)
    slot = begun(start_slot, url, steps=SYNCS)
    for step in (30, SYNCS[0] + 30, SYNCS[1] + 30):
        slot.until_step(step)
        worker = slot.worker
        worker.send(PauseCommand(snapshot=True))
        paused = worker.wait_for(ProgressEvent, lambda event: event.progress.phase is Phase.PAUSED).progress.step
        slot.until_step(paused)
        keeper = hosts.replicate(slot)
        slot.kill()
        restored = hosts.take_over(slot, keeper)
        assert (restored.step, restored.lost) == (paused, ""), restored.refused
    assert until_version(url, len(SYNCS)) == wanted


def test_a_replica_from_before_the_last_sync_costs_progress_and_says_so(
    serve: Serve, start_slot: StartSlot, hosts: Hosts, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    slot = begun(start_slot, url, steps=SYNCS)
    slot.until_step(100)
    keeper = hosts.replicate(slot)
    until_version(url, 1)
    slot.kill()
    restored = hosts.take_over(slot, keeper)
    # What it contributed since may be in the run already: it must not count twice.
    assert "may be in the run already" in restored.lost
    until_version(url, len(SYNCS))
