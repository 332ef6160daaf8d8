"""A disk that hangs, a file that somebody takes away, a kill in the middle of a change."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from controller import journal as journal_module
from controller.app import build_controller_app
from controller.clock import steady_clock
from controller.journal import Journal
from controller.journal_file import JournalReader, SqliteStore
from controller.journal_store import Batch, Store
from service.errors import UnavailableError
from tests.controller.helpers import make_settings, progress, running_app, until


class Hanging:
    """A store whose writes block until they are let go on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.go_on = threading.Event()
        self.go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, batch: Batch) -> None:
        self.go_on.wait(20)
        self._store.write(batch)


def test_a_controller_on_a_disk_that_hangs_says_so_goes_on_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMMIT_DEADLINE_S", 0.1)
    app = build_controller_app(make_settings(tmp_path, lease_timeout_s=60), clock=steady_clock())

    async def body() -> None:
        async with running_app(app) as client:
            journal = client.controller.state.journal
            hanging = Hanging(journal._store)
            lease = await client.register()
            journal._store = hanging
            hanging.go_on.clear()

            async def is_unready() -> bool:
                return (await client.http.get("/readyz")).status_code == 503

            await until(is_unready, "not ready")
            reason = (await client.http.get("/readyz")).json()["reason"]
            assert "hangs: no answer within 0.1 s" in reason
            num_decisions = client.controller.state.last_decision_id
            beat = {"instance": "first", "epoch": lease.epoch, "t_s": 0, "progress": progress(50).model_dump()}
            assert (await client.http.post("/v1/agents/island-0/heartbeat", json=beat)).status_code == 200

            async def is_told() -> bool:
                return bool((await client.directives())["directives"])

            await until(is_told, "a directive of a tick meanwhile")
            assert client.controller.state.last_decision_id > num_decisions
            assert (await client.http.put("/v1/policy", json={"name": "no_sync"})).status_code == 503
            hanging.go_on.set()

            async def is_ready() -> bool:
                return not await is_unready()

            await until(is_ready, "ready again")

    asyncio.run(body())
    assert JournalReader(tmp_path / "journal.sqlite").last_id("decisions") > 0


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_that_is_taken_away_is_told_and_gone_on_with_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, suffix: str, replaced: bool
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    path = tmp_path / "journal.sqlite"
    name, away = path.with_name(path.name + suffix), tmp_path / "away"

    async def body(journal: Journal) -> None:
        journal.put("meta", "epoch", "1")
        await journal.commit()
        name.rename(away)
        if replaced:
            name.write_bytes(b"")
        journal.put("meta", "epoch", "2")
        with pytest.raises(UnavailableError, match="replaced" if replaced else "deleted"):
            await journal.commit()
        assert journal.failure is not None
        assert "put it back" in journal.failure
        away.replace(name)
        while journal.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    journal = Journal(SqliteStore(path))
    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(body(journal), 20))
    journal.close()
    assert JournalReader(path).meta()["epoch"] == "2"
    assert len([record for record in caplog.records if "journal cannot be written" in record.getMessage()]) == 1


class Watching:
    """A store that knows when it was written to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.batches: list[dict[str, set[str]]] = []
        self.pruned = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, batch: Batch) -> None:
        self.batches.append({table: set(values) for table, values in batch.state.items()})
        self._store.write(batch)

    def prune(self, table: str, before_s: float, *, limit: int) -> int:
        num = self._store.prune(table, before_s, limit=limit)
        self.pruned.set()
        return num


def test_the_rows_of_one_change_are_written_together_whatever_wakes_the_writer(tmp_path: Path) -> None:
    store = Watching(SqliteStore(tmp_path / "journal.sqlite"))
    journal = Journal(store)

    async def body() -> None:
        journal.put("meta", "epoch", "1")
        journal.prune({"samples": 1.0})  # the writer wakes in the middle of the change
        assert await asyncio.to_thread(store.pruned.wait, 20)
        journal.put("policy", "current", "{}")
        assert JournalReader(tmp_path / "journal.sqlite").meta() == {}
        await journal.commit()

    asyncio.run(body())
    journal.close()
    assert store.batches == [{"meta": {"epoch"}, "policy": {"current"}}]


def test_what_one_journal_is_asked_while_it_writes_goes_into_the_next_batch_whole(tmp_path: Path) -> None:
    hanging = Hanging(SqliteStore(tmp_path / "journal.sqlite"))
    watching = Watching(hanging)
    journal = Journal(watching)

    async def body() -> None:
        hanging.go_on.clear()
        journal.put("meta", "a", "1")
        first = asyncio.create_task(journal.commit())
        while not watching.batches:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        journal.put("meta", "b", "1")
        journal.put("policy", "current", "{}")
        second = asyncio.create_task(journal.commit())
        await asyncio.sleep(0)
        journal.put("meta", "c", "1")  # a third change, of which more is to come
        hanging.go_on.set()
        await asyncio.gather(first, second)
        assert journal.num_queued == 1

    asyncio.run(body())
    journal.close()
    assert watching.batches == [{"meta": {"a"}}, {"meta": {"b"}, "policy": {"current"}}, {"meta": {"c"}}]


def test_what_comes_while_a_journal_closes_does_not_keep_its_writer_busy(tmp_path: Path) -> None:
    store = Hanging(SqliteStore(tmp_path / "journal.sqlite"))
    journal = Journal(store)
    store.go_on.clear()
    journal.put("meta", "epoch", "1")
    journal.close_soon()
    journal.put("meta", "epoch", "2")  # of one who does not know yet
    store.go_on.set()
    journal._thread.join(5)
    ended = not journal._thread.is_alive()
    journal.close()
    assert ended
    assert JournalReader(tmp_path / "journal.sqlite").meta()["epoch"] == "1"
