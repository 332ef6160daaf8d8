"""What is queued is written, what was acknowledged survives, and a file that cannot work is refused at start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controller import journal as journal_module
from controller import journal_file
from controller.journal import Journal
from controller.journal_file import APPLICATION_ID, JournalReader, connect, decision_row
from controller.schema import Action, DecisionRecord, PolicySpec, Reason
from service.errors import ConfigError, ConflictError, UnavailableError

FULL = sqlite3.OperationalError("database or disk is full")


def decision(number: int, t_s: float = 1.0) -> DecisionRecord:
    return DecisionRecord(
        id=number,
        t_s=t_s,
        policy="wa_diloco",
        action=Action.DEFER,
        reason=Reason.MIN_GAP,
        round=3,
        slots=(0, 1),
        terms={"score": -0.25},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def hold_writes(path: Path) -> sqlite3.Connection:
    """Another writer that keeps the file locked until it rolls back."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


def test_the_newest_state_and_every_decision_are_read_back(path: Path) -> None:
    journal = Journal(path)

    async def write() -> None:
        for h in (100, 200):
            journal.put("policy", "current", PolicySpec(name="fixed_h", params={"h": h}))
        for number in (1, 2, 3):
            journal.append("decisions", decision_row(decision(number)))
        await journal.commit()

    asyncio.run(write())
    reader = JournalReader(path)
    assert reader.values("policy", PolicySpec) == [PolicySpec(name="fixed_h", params={"h": 200})]
    assert reader.decisions(since=1, limit=10) == [decision(2), decision(3)]
    assert reader.decisions(since=0, limit=1) == [decision(1)]
    assert reader.last_decision_id() == 3
    journal.close()


def test_what_is_queued_is_written_when_the_journal_closes(path: Path) -> None:
    journal = Journal(path)
    journal.put("meta", "epoch", "7")
    journal.close()
    assert JournalReader(path).meta()["epoch"] == "7"


def test_old_log_rows_are_pruned(path: Path) -> None:
    journal = Journal(path)
    journal.append("decisions", decision_row(decision(1, t_s=10.0)))
    journal.append("decisions", decision_row(decision(2, t_s=20.0)))
    journal.prune(15.0)
    journal.close()
    assert [kept.id for kept in JournalReader(path).decisions(since=0, limit=9)] == [2]


def test_the_newest_of_numbered_rows_are_the_highest_numbers(path: Path) -> None:
    journal = Journal(path)
    for number in (1, 2, 9, 10, 11):
        journal.put("rounds", number, PolicySpec(name=str(number)))
    journal.close()
    found = JournalReader(path).values("rounds", PolicySpec, newest=3)
    assert sorted(int(spec.name) for spec in found) == [9, 10, 11]


def test_a_failing_commit_is_told_kept_and_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    journal = Journal(path)
    journal._connection.execute("PRAGMA busy_timeout=10")
    other = hold_writes(path)

    async def write() -> None:
        journal.put("meta", "epoch", "1")
        with pytest.raises(UnavailableError) as caught:
            await journal.commit()
        assert caught.value.field == "--journal"
        assert journal.failure is not None
        assert journal.num_failures >= 1
        journal.put("meta", "epoch", "2")
        other.execute("ROLLBACK")
        while journal.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await journal.commit()

    asyncio.run(asyncio.wait_for(write(), 10))
    assert JournalReader(path).meta()["epoch"] == "2"
    other.close()
    journal.close()


def test_while_the_disk_fails_the_log_is_bounded_and_losses_are_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_QUEUED_ROWS", 10)
    monkeypatch.setattr(journal_module, "RETRY_S", 60.0)
    journal = Journal(path)
    journal._connection.execute("PRAGMA busy_timeout=10")
    other = hold_writes(path)

    async def write() -> None:
        for number in range(1, 16):
            journal.append("decisions", decision_row(decision(number)))
        journal.put("meta", "epoch", "1")
        with pytest.raises(UnavailableError):
            await journal.commit()

    asyncio.run(write())
    assert (journal.num_dropped, journal.num_queued) == (5, 11)
    other.close()
    journal.close()
    reader = JournalReader(path)
    assert [kept.id for kept in reader.decisions(since=0, limit=99)] == list(range(6, 16))
    assert reader.meta()["epoch"] == "1"


def as_directory(path: Path) -> None:
    path.mkdir()


def as_text(path: Path) -> None:
    path.write_text("this is no database" * 100)


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_lock_pipe(path: Path) -> None:
    os.mkfifo(path.with_name(path.name + ".lock"))


def as_newer(path: Path) -> None:
    connection = connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (as_directory, "cannot use"),
        (as_text, "not a database"),
        (as_newer, "newer version"),
        (as_pipe, "not a regular file"),
        (as_lock_pipe, "not a regular file"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_the_option_named(
    path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(path)
    with pytest.raises(ConfigError, match=words) as caught:
        Journal(path)
    assert caught.value.field == "--journal"
    assert caught.value.remedy


def test_the_database_of_another_application_is_refused_and_left_as_it_is(path: Path) -> None:
    other = sqlite3.connect(path)
    other.executescript("CREATE TABLE meta (key TEXT PRIMARY KEY, body TEXT); PRAGMA user_version=1;")
    other.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another application") as caught:
        Journal(path)
    assert (caught.value.field, "does not exist yet" in str(caught.value.remedy)) == ("--journal", True)
    assert path.read_bytes() == before


def test_a_marked_database_of_another_application_is_refused(path: Path) -> None:
    Journal(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA application_id=42")
    other.close()
    with pytest.raises(ConfigError, match="another application"):
        Journal(path)


def test_a_journal_from_before_the_mark_is_opened_and_marked(path: Path) -> None:
    journal = Journal(path)
    journal.put("meta", "epoch", "7")
    journal.close()
    before = sqlite3.connect(path)
    before.execute("PRAGMA application_id=0")
    before.close()
    Journal(path).close()
    assert JournalReader(path).meta()["epoch"] == "7"
    after = sqlite3.connect(path)
    assert after.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    after.close()


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        Journal(tmp_path / "nowhere" / "journal.sqlite")
    assert caught.value.field == "--journal"


def test_two_controllers_cannot_share_a_journal(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(ConflictError, match="another controller"):
        Journal(path)
    journal.close()
    Journal(path).close()


def test_a_query_ends_at_its_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO meta VALUES (?, 'x')", [(str(number),) for number in range(200_000)])
    monkeypatch.setattr(journal_file, "QUERY_DEADLINE_S", -1.0)
    with pytest.raises(UnavailableError, match="interrupted"):
        JournalReader(path).meta()


def test_a_row_beyond_the_bound_is_refused(path: Path) -> None:
    Journal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO meta VALUES ('k', zeroblob(?))", (journal_file.MAX_ROW_BYTES + 1,))
    with pytest.raises(UnavailableError, match="too big"):
        JournalReader(path).meta()


def test_reading_leaves_the_writer_its_locks(path: Path) -> None:
    """POSIX ends every lock of a process on a file when it closes any descriptor of that file."""
    Journal(path).close()
    other = hold_writes(path)
    try:
        JournalReader(path).meta()
        script = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
        tried = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    finally:
        other.rollback()
        other.close()
    assert "database is locked" in tried.stderr
