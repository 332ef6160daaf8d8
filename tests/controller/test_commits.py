"""Answers that may wait a moment share a commit."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

import controller.commits
from controller.commits import Commits
from controller.journal import Journal
from controller.journal_file import SqliteStore
from controller.journal_store import Batch, StoreError
from controller.leadership import SoleLeader
from tests.controller.helpers import DEADLINE_S

NUM = 50


class CountingStore(SqliteStore):
    """Counts transactions; fails when told."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_writes = 0
        self.fails = False

    def write(self, batch: Batch) -> None:
        if self.fails:
            raise StoreError("disk full")
        self.num_writes += 1
        super().write(batch)


def test_what_comes_together_is_written_together(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "journal.sqlite")

    async def main(journal: Journal) -> None:
        commits = Commits(lambda: journal, SoleLeader())

        async def answer(number: int) -> bool:
            journal.put("meta", f"key-{number}", "value")
            return await commits.soon()

        assert await answer(0)
        assert store.num_writes == 1
        assert all(await asyncio.gather(*(answer(number) for number in range(1, NUM))))
        assert store.num_writes < NUM // 2  # three, unless the machine stands still
        assert len(journal.reader().meta()) == NUM

    with closing(Journal(store)) as journal:
        asyncio.run(main(journal))


def test_one_who_comes_alone_does_not_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller.commits, "TOGETHER_S", 1e6)

    async def main(journal: Journal) -> None:
        commits = Commits(lambda: journal, SoleLeader())
        for number in range(NUM):
            journal.put("meta", f"key-{number}", "value")
            assert await commits.soon()

    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        asyncio.run(asyncio.wait_for(main(journal), 6 * DEADLINE_S))


@pytest.mark.parametrize("when", ["now", "soon"])
def test_a_disk_that_fails_is_told_and_holds_up_nobody(tmp_path: Path, when: str) -> None:
    store = CountingStore(tmp_path / "journal.sqlite")

    async def main(journal: Journal) -> None:
        commits = Commits(lambda: journal, SoleLeader())
        store.fails = True
        journal.put("meta", "key", "value")
        assert not await getattr(commits, when)()
        assert not await getattr(commits, when)()
        store.fails = False

    with closing(Journal(store)) as journal:
        asyncio.run(main(journal))
