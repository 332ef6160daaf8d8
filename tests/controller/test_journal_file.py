"""The journal in a file: what is refused at start, what is migrated, and how its space comes back."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controller import journal_file
from controller.app import build_controller_app
from controller.config import ControllerSettings
from controller.journal import Journal
from controller.journal_file import APPLICATION_ID, JournalReader, Lock, SqliteStore, connect
from controller.journal_store import Batch
from controller.journal_tables import SCHEMA_VERSION
from controller.records import AgentRecord, RoundEntry
from service.errors import ConfigError, ConflictError, UnavailableError

VERSION_1 = Path(__file__).parents[1] / "data" / "journal-version-1.sqlite"
"""Written by the code of version 1: a run of two islands with two rounds."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def hold_writes(path: Path) -> sqlite3.Connection:
    """Another writer that keeps the file locked until it rolls back."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


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


def test_a_file_with_damaged_pages_is_refused_by_name(path: Path) -> None:
    store = SqliteStore(path)
    store.write(Batch(number=1, target=1, log={"samples": [("vllm-0", 1.0, "x" * 2000)] * 500}))
    store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises((ConfigError, UnavailableError), match="malformed") as caught:
        build_controller_app(ControllerSettings(journal=path))
    assert caught.value.field == "--journal"
    # It is let go of, for whoever repairs it.
    Lock(path).release()


def test_a_link_to_a_journal_is_the_same_journal(tmp_path: Path) -> None:
    path, alias = tmp_path / "j.sqlite", tmp_path / "alias.sqlite"
    alias.symlink_to(path)
    held = Lock(path)
    with pytest.raises(ConflictError, match="in use"):
        Lock(alias)
    held.release()
    Lock(alias).release()


@pytest.fixture
def old_path(path: Path) -> Path:
    shutil.copy(VERSION_1, path)
    return path


def version_of(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_a_journal_of_version_1_is_migrated_with_everything_in_it(old_path: Path) -> None:
    assert version_of(old_path) == 1
    before = JournalReader(old_path)
    agents, rounds, samples = (
        before.values("agents", AgentRecord),
        before.values("rounds", RoundEntry),
        list(before.samples()),
    )
    assert (len(agents), len(rounds)) == (2, 2)
    assert samples
    Journal(old_path).close()
    assert version_of(old_path) == SCHEMA_VERSION
    after = JournalReader(old_path)
    assert after.values("agents", AgentRecord) == agents
    assert after.values("rounds", RoundEntry) == rounds
    assert list(after.samples()) == samples
    decisions = after.decisions(since=0, limit=10_000)
    assert decisions[-1].id == after.last_id("decisions") > 0
    assert {(one.slot, one.shadow) for one in decisions} == {(None, False)}
    assert after.page("recoveries", since=0, limit=9) == []


def test_a_journal_of_version_1_that_has_the_new_columns_already_keeps_what_is_in_them(old_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(old_path)) as connection:
        connection.executescript(
            "ALTER TABLE decisions ADD COLUMN slot INTEGER;"
            "ALTER TABLE decisions ADD COLUMN shadow INTEGER NOT NULL DEFAULT 0;"
            "CREATE TABLE recoveries (id INTEGER PRIMARY KEY, t_s REAL NOT NULL, slot INTEGER, agent_id TEXT NOT NULL,"
            " kind TEXT NOT NULL, body TEXT NOT NULL);"
            "UPDATE decisions SET slot = 1, shadow = 1 WHERE id = 1;"
        )
    Journal(old_path).close()
    assert version_of(old_path) == SCHEMA_VERSION
    (first,) = JournalReader(old_path).decisions(since=0, limit=1)
    assert (first.slot, first.shadow) == (1, True)


def test_a_migrated_journal_differs_from_a_new_one_in_nothing(old_path: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh.sqlite"
    Journal(fresh).close()
    Journal(old_path).close()
    schemas = []
    for path in (fresh, old_path):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            columns = "SELECT m.name, c.name, c.type, c.pk FROM sqlite_master m, pragma_table_info(m.name) c"
            indices = "SELECT name, sql FROM sqlite_master WHERE type = 'index' ORDER BY name"
            pragmas = [connection.execute(f"PRAGMA {name}").fetchone() for name in ("auto_vacuum", "application_id")]
            found = (sorted(connection.execute(columns)), connection.execute(indices).fetchall(), pragmas)
        schemas.append(found)
    assert schemas[0] == schemas[1]


DYING = """
import os, signal, sqlite3, sys
from pathlib import Path
from controller import journal_file
from controller.app import build_controller_app
from controller.config import ControllerSettings
real = sqlite3.connect
def connect(*arguments, **options):
    connection = real(*arguments, **options)
    left = int(sys.argv[2])
    def step():
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
    connection.set_progress_handler(step, 1)
    return connection
journal_file.sqlite3.connect = connect
journal_file.connect(Path(sys.argv[1]))
print("done")
"""


def test_a_migration_that_is_killed_at_any_point_leaves_a_file_that_opens(tmp_path: Path) -> None:
    """Killed after so many steps of SQLite's machine: before, within and after the transaction, and in the rebuild."""
    killed = 0
    for steps in (40, 100, 200, 400, 800, 1500, 3000, 10_000):
        path = tmp_path / f"{steps}.sqlite"
        shutil.copy(VERSION_1, path)
        ended = subprocess.run([sys.executable, "-c", DYING, str(path), str(steps)], capture_output=True, check=False)
        killed += ended.returncode == -9
        assert version_of(path) in {1, SCHEMA_VERSION}
        Journal(path).close()
        reader = JournalReader(path)
        assert version_of(path) == SCHEMA_VERSION
        assert len(reader.values("rounds", RoundEntry)) == 2
        assert reader.decisions(since=0, limit=9)
    assert killed >= 3


def test_a_file_from_before_that_is_large_is_migrated_and_not_rebuilt(
    old_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "REBUILT_BYTES", 1000)
    store = SqliteStore(old_path)
    assert store._connection.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    assert store.tidy() is False
    store.close()


def test_space_comes_back_after_a_prune(path: Path) -> None:
    store = SqliteStore(path)
    row = ("vllm-0", 1.0, "x" * 2000)
    store.write(Batch(number=1, target=1, log={"samples": [row] * 20_000}))
    while store.tidy():
        pass
    full = store.size_bytes()
    assert full is not None
    assert full > 30 << 20
    assert path.with_name(path.name + "-wal").stat().st_size == 0
    while store.prune("samples", 2.0, limit=5000):
        pass
    while store.tidy():
        pass
    left = store.size_bytes()
    assert left is not None
    assert left < full / 10
    store.close()


def test_a_reader_does_not_keep_the_writer_from_going_on(path: Path) -> None:
    store = SqliteStore(path)
    store.write(Batch(number=1, target=1, log={"samples": [("vllm-0", 1.0, "x" * 2000)] * 100}))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM samples").fetchone()
        assert store.prune("samples", 2.0, limit=1000) == 99
        assert store.tidy() is False
        store.write(Batch(number=2, target=2, state={"meta": {"epoch": "1"}}))
        other.execute("COMMIT")
    assert store._connection.execute("PRAGMA busy_timeout").fetchone() == (5000,)
    store.close()
    assert JournalReader(path).meta() == {"epoch": "1"}
