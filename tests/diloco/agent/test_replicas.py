"""Replicas travel whole or not at all, go on where they stopped, and are refused when old, foreign or damaged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco.agent.replica_client import ReplicaClient, make_offer
from diloco.agent.replica_fetch import ReplicaFetcher, candidates_of
from diloco.agent.replica_sender import ReplicaSender, Source
from diloco.agent.replica_store import ReplicaStore
from diloco.agent.replica_wire import CHUNK_BYTES, CHUNK_DIGEST_HEADER
from diloco.digest import ByteRange
from diloco.recovery_schema import Peer, ReplicaNotice, ReplicaPlace, SentReplica
from diloco.vault.file import VaultFile
from service.errors import ConflictError, InputError, OverloadedError, UnavailableError, WadilocoError
from tests.diloco.agent.replicas import HOT_BYTES, RUN, Keeper, WorkerVault, contents, network

TIMEOUT_S = 30.0


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 100))


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        await asyncio.sleep(0.005)


def client_of(http: httpx.AsyncClient, keeper: Keeper) -> ReplicaClient:
    return ReplicaClient(http, keeper.peer.url, timeout_s=TIMEOUT_S)


async def send(client: ReplicaClient, worker: WorkerVault, number: int, *, epoch: int = 3) -> None:
    (generation,) = [each for each in worker.vault.generations() if each.number == number]
    reply = await client.offer(make_offer(worker.vault.layout, generation), epoch=epoch)
    for index, part in enumerate(generation.parts):
        data = bytes(worker.vault.view(part))
        while (start := reply.received_bytes[index]) < part.length:
            piece = data[start : start + CHUNK_BYTES]
            at = ByteRange(start, start + len(piece), part.length)
            reply = await client.send(generation, index, at, piece, epoch=epoch)
    assert reply.complete


def test_a_sender_keeps_a_buddy_at_the_newest_generation_and_sends_what_is_new(tmp_path: Path) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "buddy")

    async def body() -> None:
        async with network(keeper) as http:
            sender = ReplicaSender(http, lambda: Source(epoch=3, paths=(worker.path,)), timeout_s=TIMEOUT_S)
            ending = asyncio.Event()
            running = asyncio.create_task(sender.run(lambda: [keeper.peer], ending))
            first = worker.commit(1)
            await until(lambda: [n.generation for n in keeper.store.notices()] == [1], "generation 1")
            num_first = len(keeper.chunks)
            second = worker.commit(2)
            await until(lambda: [n.generation for n in keeper.store.notices()] == [2, 1], "generation 2")
            assert {path.rpartition("/")[2] for path in keeper.chunks[num_first:]} == {"1"}, "the base came again"
            for written in (first, second):
                vault, found = keeper.store.whole(1, 0, written.number)
                assert contents(vault, found) == contents(worker.vault, written)
                assert found.state == written.state
            worker.commit(3, new_base=True)
            await until(lambda: [n.generation for n in keeper.store.notices()] == [3, 2], "generation 3")
            await until(lambda: sender.told()[0].generation == 3, "the sender knows")
            (told,) = sender.told()
            assert (told.buddy, told.step, told.steps_behind) == ("buddy", 30, 0)
            ending.set()
            await running

    run(body())


def test_a_sender_skips_to_the_newest_and_a_dead_buddy_holds_up_nobody(tmp_path: Path) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "buddy")
    dead = Peer(agent_id="dead", url="http://dead", node="x")

    async def body() -> None:
        async with network(keeper) as http:
            sender = ReplicaSender(http, lambda: Source(epoch=3, paths=(worker.path,)), timeout_s=TIMEOUT_S)
            ending = asyncio.Event()
            running = asyncio.create_task(sender.run(lambda: [dead, keeper.peer], ending))
            keeper.may_answer.clear()
            worker.commit(1)
            await until(lambda: bool(keeper.chunks), "a chunk under way")
            for number in range(2, 30):
                worker.commit(number)
            keeper.may_answer.set()
            await until(lambda: any(n.generation == 29 for n in keeper.store.notices()), "the newest")

            def told() -> dict[str, SentReplica]:
                return {each.buddy: each for each in sender.told()}

            await until(lambda: told()["buddy"].generation == 29, "the sender knows")
            assert told()["buddy"].generations == 2
            assert told()["dead"].generation is None
            assert "refused" in told()["dead"].failure
            ending.set()
            await running

    run(body())


def test_a_replica_goes_on_where_it_stopped(tmp_path: Path) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "buddy")

    async def body() -> None:
        async with network(keeper) as http:
            client = client_of(http, keeper)
            worker.commit(1)
            keeper.fail_after = 2
            with pytest.raises(UnavailableError):
                await send(client, worker, 1)
            assert keeper.store.notices() == ()
            keeper.fail_after = None
            before = len(keeper.chunks)
            await send(client, worker, 1)
            assert len(keeper.chunks) == 4  # three of the hot part, one of the base
            assert before == 2

    run(body())


def test_a_buddy_that_dies_in_mid_replication_still_has_the_generation_before(tmp_path: Path) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "buddy")

    async def body() -> None:
        async with network(keeper) as http:
            client = client_of(http, keeper)
            first = worker.commit(1)
            await send(client, worker, 1)
            worker.commit(2)
            keeper.fail_after = len(keeper.chunks) + 1
            with pytest.raises(UnavailableError):
                await send(client, worker, 2)
            # As after a kill: nothing is closed in order, and the lock goes with the process.
            keeper.store.close(remove=False)
            again = ReplicaStore(tmp_path / "b", owner="buddy", limit_bytes=1 << 30)
            again.adopt()
            assert [n.generation for n in again.notices()] == [1]
            vault, found = again.whole(1, 0, 1)
            vault.verify(found)
            assert found.step == first.step
            again.close(remove=True)

    run(body())


def test_damaged_bytes_do_not_count(tmp_path: Path) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "buddy")

    async def body() -> None:
        async with network(keeper) as http:
            client = client_of(http, keeper)
            generation = worker.commit(1)
            await client.offer(make_offer(worker.vault.layout, generation), epoch=3)
            data = bytes(worker.vault.view(generation.parts[0]))[:CHUNK_BYTES]
            headers = {"Content-Range": f"bytes 0-{len(data) - 1}/{generation.parts[0].length}"}
            url = f"{keeper.peer.url}/v1/replicas/1/0/1/0?epoch=3"
            damaged = await http.put(url, content=data, headers={**headers, CHUNK_DIGEST_HEADER: "0" * 32})
            assert damaged.status_code == 422
            # Bytes that are as announced, and not those of the generation: found out at the end, and sent anew.
            wrong = b"\0" * CHUNK_BYTES
            at = ByteRange(0, CHUNK_BYTES, generation.parts[0].length)
            reply = await client.send(generation, 0, at, wrong, epoch=3)
            assert reply.received_bytes[0] == CHUNK_BYTES
            with pytest.raises(InputError, match="does not match the digest"):
                await send(client, worker, 1)
            assert keeper.store.notices() == ()
            await send(client, worker, 1)
            assert len(keeper.store.notices()) == 1

    run(body())


def test_a_holder_that_has_lost_its_slot_is_refused(tmp_path: Path) -> None:
    old, new = WorkerVault(tmp_path / "old"), WorkerVault(tmp_path / "new", seed=9)
    keeper = Keeper(tmp_path / "b", "buddy")

    async def body() -> None:
        async with network(keeper) as http:
            client = client_of(http, keeper)
            old.commit(50)
            await send(client, old, 50, epoch=3)
            late = old.commit(51)
            await client.offer(make_offer(old.vault.layout, late), epoch=3)
            new.commit(40, instance="b", epoch=5)
            await send(client, new, 40, epoch=5)
            # A worker takes the highest number that it finds: those of the old holder must be gone.
            assert [(n.generation, n.epoch) for n in keeper.store.notices()] == [(40, 5)]
            with pytest.raises(ConflictError) as caught:
                await client.offer(make_offer(old.vault.layout, late), epoch=3)
            assert caught.value.field == "epoch"
            with pytest.raises(ConflictError):
                await client.send(late, 0, ByteRange(0, 1, late.parts[0].length), b"x", epoch=3)

    run(body())


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"run_id": "other"}, ConflictError), ({"slot": 2}, InputError), ({"rank": 1}, InputError)],
    ids=["run", "slot", "rank"],
)
def test_foreign_generations_are_refused(tmp_path: Path, fields: dict[str, Any], error: type[WadilocoError]) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "buddy")

    async def body() -> None:
        async with network(keeper) as http:
            generation = worker.commit(1).model_copy(update=fields)
            offer = make_offer(worker.vault.layout, generation).model_dump(mode="json")
            answer = await http.put(f"{keeper.peer.url}/v1/replicas/1/0/1?epoch=3", json=offer)
            assert answer.status_code == error.http_status
            assert keeper.store.allocated_bytes == 0

    run(body())


def test_memory_is_bounded_allocated_once_and_given_back(tmp_path: Path) -> None:
    size = WorkerVault(tmp_path / "size").vault.layout.num_bytes
    keeper = Keeper(tmp_path / "b", "buddy", limit_bytes=size + size // 2)
    mine, other = WorkerVault(tmp_path / "own"), WorkerVault(tmp_path / "other", slot=2)

    async def body() -> None:
        async with network(keeper) as http:
            client = client_of(http, keeper)
            for number in range(1, 4):
                mine.commit(number, new_base=True)
                await send(client, mine, number)
                assert keeper.store.allocated_bytes == size
            other.commit(1)
            with pytest.raises(OverloadedError, match="replicas would take") as caught:
                await send(client, other, 1)
            assert caught.value.field == "replica_limit_mb"
            keeper.store.release({1})
            assert len(keeper.store.notices()) == 2
            keeper.store.release(())
            assert keeper.store.allocated_bytes == 0
            assert list((tmp_path / "b").iterdir()) == []
            await send(client, other, 1)

    run(body())


def place(keeper: Keeper, notice: ReplicaNotice) -> ReplicaPlace:
    return ReplicaPlace(holder=keeper.peer, replica=notice)


def test_a_taker_fetches_all_ranks_from_whoever_has_them(tmp_path: Path) -> None:
    workers = [WorkerVault(tmp_path / f"own-{rank}", rank=rank, num_ranks=2) for rank in range(2)]
    one, two, taker = (Keeper(tmp_path / name, name) for name in ("one", "two", "taker"))

    async def body() -> None:
        async with network(one, two, taker) as http:
            written = [worker.commit(1) for worker in workers]
            await send(client_of(http, one), workers[0], 1)
            await send(client_of(http, two), workers[1], 1)
            # A newer one of which a rank is missing.
            workers[0].commit(2)
            await send(client_of(http, one), workers[0], 2)
            places = [place(keeper, n) for keeper in (one, two) for n in keeper.store.notices()]
            fetcher = ReplicaFetcher(http, taker.store, own_id="taker", timeout_s=TIMEOUT_S)
            found = await fetcher.obtain(1, 2, places, epoch=7, refused=[])
            assert found is not None
            assert (found.generation, found.step, sorted(found.paths)) == (1, 10, [0, 1])
            for rank, path in found.paths.items():
                with VaultFile.adopt(path) as vault:
                    (generation,) = vault.generations()
                    vault.verify(generation)
                    assert contents(vault, generation) == contents(workers[rank].vault, written[rank])

    run(body())


def test_what_cannot_be_fetched_is_told_and_the_next_best_is_taken(tmp_path: Path) -> None:
    worker = WorkerVault(tmp_path / "own")
    dies, stale, taker = (Keeper(tmp_path / name, name) for name in ("dies", "stale", "taker"))

    async def body() -> None:
        async with network(dies, stale, taker) as http:
            worker.commit(1)
            await send(client_of(http, stale), worker, 1)
            worker.commit(2)
            await send(client_of(http, dies), worker, 2)
            places = [place(keeper, n) for keeper in (dies, stale) for n in keeper.store.notices()]
            dies.fail_after = len(dies.chunks) + 1  # in the middle of the restore
            refused: list[str] = []
            fetcher = ReplicaFetcher(http, taker.store, own_id="taker", timeout_s=TIMEOUT_S)
            found = await fetcher.obtain(1, 1, places, epoch=7, refused=refused)
            assert found is not None
            assert found.step == 10
            (why,) = refused
            assert why.startswith("replica at step 20: replica: dies:")

    run(body())


def test_a_damaged_replica_of_the_own_is_not_used(tmp_path: Path) -> None:
    worker, taker = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "taker", "taker")

    async def body() -> None:
        async with network(taker) as http:
            worker.commit(1)
            await send(client_of(http, taker), worker, 1)
            vault, generation = taker.store.whole(1, 0, 1)
            vault.view(generation.part("hot"))[HOT_BYTES // 2 : HOT_BYTES // 2 + 8] = b"damaged!"
            refused: list[str] = []
            fetcher = ReplicaFetcher(http, taker.store, own_id="taker", timeout_s=TIMEOUT_S)
            assert await fetcher.obtain(1, 1, [], epoch=7, refused=refused) is None
            assert "does not match its digest" in refused[0]

    run(body())


def notice(step: int, *, epoch: int = 3, rank: int = 0, **fields: Any) -> ReplicaNotice:
    base = {"slot": 1, "rank": rank, "generation": step, "step": step, "epoch": epoch}
    return ReplicaNotice.model_validate({**base, **fields})


def test_candidates_go_by_epoch_and_step_and_need_every_rank() -> None:
    far = Peer(agent_id="far", url="http://far", node="far")
    own = [notice(5), notice(9, num_ranks=2), notice(7, slot=2), notice(99, complete=False)]
    others = [ReplicaPlace(holder=far, replica=n) for n in (notice(3, epoch=4), notice(6), notice(5))]
    found = candidates_of(1, 1, own, others)
    assert [(each.epoch, each.step, each.holders) for each in found] == [
        (4, 3, ((far,),)),
        (3, 6, ((far,),)),
        (3, 5, ((),)),
    ]
    half = [ReplicaPlace(holder=far, replica=notice(9, num_ranks=2, rank=1))]
    (both,) = candidates_of(1, 2, own, half)
    assert both.holders == ((), (far,))
    assert candidates_of(1, 2, own, []) == []


def test_the_state_is_sent_at_once_when_a_slot_is_handed_over(tmp_path: Path) -> None:
    worker, keeper = WorkerVault(tmp_path / "own"), Keeper(tmp_path / "b", "taker")

    async def body() -> None:
        async with network(keeper) as http:
            sender = ReplicaSender(http, lambda: Source(epoch=3, paths=(worker.path,)), timeout_s=TIMEOUT_S)
            worker.commit(1)
            sending = asyncio.create_task(sender.send_newest(keeper.peer, at_least=2, deadline_s=time.monotonic() + 60))
            await asyncio.sleep(0)
            worker.commit(2)
            assert await sending
            assert [n.generation for n in keeper.store.notices()] == [2]
            nobody = Peer(agent_id="nobody", url="http://nobody", node="x")
            assert not await sender.send_newest(nobody, at_least=2, deadline_s=time.monotonic() + 0.2)

    run(body())


def test_the_run_of_the_fixtures_is_the_one_that_keepers_expect(tmp_path: Path) -> None:
    assert Keeper(tmp_path, "x").store.run_id == RUN
