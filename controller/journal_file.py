"""The journal in one SQLite file (WAL): opening with clear errors, the lock, writing, reading.

``synchronous=NORMAL``: a power failure may lose the last commits, a killed process none.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from controller.journal_reader import Reader
from controller.journal_rows import write_rows
from controller.journal_store import Batch, StoreError
from controller.journal_tables import (
    LOG_TABLES,
    ROUND_NUMBER,
    SCHEMA_VERSION,
    STATE_TABLES,
    Row,
    oldest_rows,
)
from service.errors import ConfigError, ConflictError
from service.files import check_regular, open_regular

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x57444C43
"""Marks our files ("WDLC"). Journals from before it are known by their tables, and marked when they are opened."""
_UNMARKED_TABLES = frozenset({*STATE_TABLES, "samples", "decisions"})

_TABLES_OF_1 = """
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY, server_id TEXT NOT NULL, t_s REAL NOT NULL, body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS samples_by_time ON samples (t_s);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, policy TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL,
    round INTEGER NOT NULL, slots TEXT NOT NULL, terms TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS decisions_by_time ON decisions (t_s);
""" + "".join(
    f"CREATE TABLE IF NOT EXISTS {name} (key TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;\n"
    for name in STATE_TABLES
)
_TABLES_OF_2 = f"""
CREATE TABLE IF NOT EXISTS recoveries (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, slot INTEGER, agent_id TEXT NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS recoveries_by_time ON recoveries (t_s);
CREATE INDEX IF NOT EXISTS rounds_by_number ON rounds ({ROUND_NUMBER});
"""
MIGRATIONS = (_TABLES_OF_1, _TABLES_OF_2)
"""At n: from version n to n + 1. A new file goes through all of them, so none is ever untried."""
_COLUMNS_OF_2 = {"slot": "slot INTEGER", "shadow": "shadow INTEGER NOT NULL DEFAULT 0"}
"""Of decisions. Some files of version 1 have them, and recoveries, already."""

_BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a database."""
QUERY_DEADLINE_S = 60.0
"""For one query; the longest, a page of samples, takes some 50 ms."""
MAX_ROW_BYTES = 16 << 20
"""The largest rows, rounds with a report per slot, have some 500 bytes per slot."""
_PROGRESS_STEPS = 100_000
"""Steps of SQLite's machine, under 10 ms, between two looks at the clock."""
_IS_STORED = (
    "SELECT 1 FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name = ?"
    " AND NOT EXISTS (SELECT 1 FROM pragma_table_xinfo(sqlite_master.name) WHERE hidden)"
)
"""A view, a virtual table or a computed column could go on for ever."""
INCREMENTAL = 2
"""Value of auto_vacuum: free pages are given back when asked, and not at every commit."""
REBUILT_BYTES = 64 << 20
"""Files of version 1 cannot give pages back unless they are written anew once. Larger ones are left as they are: they
use their free pages again, so they do not grow for ever either."""
VACUUM_PAGES = 2000
"""Pages given back per step (8 MB); what waits to be written comes between two steps."""
KEPT_FREE_FRAC = 0.25
"""Share of the file that may be free pages: the next rows use them, and giving them back would only be undone."""
_PAGE_NUMBERS = ("auto_vacuum", "freelist_count", "page_count")
KEPT_WAL_BYTES = 16 << 20
"""To which the WAL is cut after a rush."""
READERS_WAIT_MS = 100
"""How long cutting the WAL waits for readers; it is tried again after the next prune."""


class Lock:
    """One controller per journal: two would hand out the same rounds."""

    def __init__(self, path: Path) -> None:
        real = Path(os.path.realpath(path))  # a link to it is the same journal
        lock_path = real.with_name(real.name + ".lock")
        try:
            self._file = os.fdopen(open_regular(lock_path, os.O_RDWR | os.O_CREAT), "r+b")
        except OSError as exc:
            raise _cannot_open(path, exc.strerror or str(exc)) from exc
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self._file.close()
            raise ConflictError(
                f"{path} is in use by another controller", field="--journal", remedy="stop it, or name another file"
            ) from exc

    def release(self) -> None:
        self._file.close()


def connect(path: Path) -> sqlite3.Connection:
    """Open or make the journal for writing, and bring it to this version's schema in one transaction.

    Raises:
        ConfigError: the file cannot be made, read or written, belongs to another application, or a newer version
            wrote it.
    """
    try:
        _refuse_special_files(path)
    except OSError as exc:
        raise _cannot_open(path, exc.strerror or str(exc)) from exc
    try:
        # The connection is made here and used by the writer thread alone.
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    except sqlite3.Error as exc:
        raise _cannot_open(path, str(exc)) from exc
    try:
        _prepare(connection, path)
    except sqlite3.Error as exc:
        connection.close()
        raise _cannot_open(path, str(exc)) from exc
    except ConfigError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    # Nothing is written before it is known whose file it is.
    if not _is_ours(connection):
        raise ConfigError(
            f"{path} is a database of another application",
            field="--journal",
            remedy="name a file that does not exist yet, or the journal of this run",
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} was written by a newer version (schema {version}, this one knows {SCHEMA_VERSION})",
            field="--journal",
            remedy="use the newer version, or another file",
        )
    connection.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")  # Only a file that is still empty takes it.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA journal_size_limit={KEPT_WAL_BYTES}")
    _migrate(connection, version, path)
    # A full disk may still take the tables' few pages; find out now, not with the first round.
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('probe', hex(zeroblob(65536)))")
    connection.execute("DELETE FROM meta WHERE key = 'probe'")


def _migrate(connection: sqlite3.Connection, version: int, path: Path) -> None:
    present = {str(row[1]) for row in connection.execute("PRAGMA table_info(decisions)")}
    missing = [column for name, column in _COLUMNS_OF_2.items() if name not in present]
    steps = "".join([*MIGRATIONS[version:], *(f"ALTER TABLE decisions ADD COLUMN {column};" for column in missing)])
    marks = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={SCHEMA_VERSION};"
    connection.executescript(f"BEGIN IMMEDIATE; {steps} {marks} COMMIT;")
    if 0 < version < SCHEMA_VERSION:
        logger.info("journal migrated path=%s from_version=%d to_version=%d", path, version, SCHEMA_VERSION)
        _rebuild(connection, path)


def _rebuild(connection: sqlite3.Connection, path: Path) -> None:
    """Let a file from before version 2 give pages back, if that costs little."""
    (mode,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    if mode == INCREMENTAL or path.stat().st_size > REBUILT_BYTES:
        return
    try:
        connection.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")
        connection.execute("VACUUM")
    except sqlite3.Error as exc:
        logger.warning("journal cannot be rebuilt and will not give space back path=%s error=%s", path, exc)


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Whether it is empty, marked, or has the tables of a journal and a version of its schema."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    found = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    (num_objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != 0:
        return bool(application == APPLICATION_ID)
    if num_objects == 0:
        return bool(version == 0)
    return bool(version > 0) and found >= _UNMARKED_TABLES


def _cannot_open(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot use {path}: {why}",
        field="--journal",
        remedy="name a file in a directory that exists, is writable and has space",
    )


def _refuse_special_files(path: Path) -> None:
    """SQLite would wait for a pipe, for ever.

    Raises:
        OSError: the file, or one that SQLite keeps beside it, is there and is no regular file.
    """
    for suffix in ("", *_BESIDE):
        # Looked at, not opened: to close it would end every lock that SQLite holds on it in this process.
        check_regular(path.with_name(path.name + suffix))


def _bound(connection: sqlite3.Connection) -> None:
    """Let no schema make a query endless: a file may come from anywhere."""
    deadline_s = time.monotonic() + QUERY_DEADLINE_S
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
    connection.set_progress_handler(lambda: time.monotonic() > deadline_s, _PROGRESS_STEPS)


class SqliteStore:
    """The file, opened for writing by one controller."""

    remedy = "free space on its disk; retried"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._lock = Lock(path)
        try:
            self._connection = connect(path)
        except BaseException:
            self._lock.release()
            raise
        self._opened = self._identify()

    def reader(self) -> Reader:
        return JournalReader(self.path)

    def _identify(self) -> tuple[tuple[int, int] | None, ...]:
        """Which files have the names of the journal and of its WAL, where what is committed goes first."""
        return tuple(_identity(self.path.with_name(self.path.name + suffix)) for suffix in ("", "-wal"))

    def _check_in_place(self) -> None:
        """Raises `StoreError` when the file is another, or none: whatever was written would end with the process."""
        for opened, found, suffix in zip(self._opened, self._identify(), ("", "-wal"), strict=True):
            if opened != found:
                what = "was deleted" if found is None else "was replaced"
                raise StoreError(
                    f"{self.path.name}{suffix} {what} while the controller runs: put it back, or restart the controller"
                    f" to go on with what is there"
                )

    def write(self, batch: Batch) -> None:
        self._check_in_place()
        with _mapped(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for table in batch.state:
                write_rows(self._connection, table, ("key", "body"), list(batch.kept(table).items()))
                delete = f"DELETE FROM {table} WHERE key = ?"  # noqa: S608
                self._connection.executemany(delete, ((key,) for key in batch.gone(table)))
            for table, log in batch.log.items():
                write_rows(self._connection, table, tuple(LOG_TABLES[table]), list(log))

    def prune(self, table: str, before_s: float, *, limit: int) -> int:
        delete = f"DELETE FROM {table} WHERE id IN ({oldest_rows(table)})"  # noqa: S608
        with _mapped():
            return self._connection.execute(delete, (before_s, limit)).rowcount

    def tidy(self) -> bool:
        with _mapped():
            spare = self._num_spare_pages()
            if spare > 0:
                # A step of the statement is one page, and only a script takes all steps.
                self._connection.executescript(f"PRAGMA incremental_vacuum({min(spare, VACUUM_PAGES)})")
            if spare > VACUUM_PAGES:
                return True
            self._cut_wal()
            return False

    def _num_spare_pages(self) -> int:
        """Free pages beyond what the next rows will use; 0 in a file that cannot give any back."""
        numbers = [self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _PAGE_NUMBERS]
        mode, num_free, num_pages = numbers
        return max(0, num_free - int(num_pages * KEPT_FREE_FRAC)) if mode == INCREMENTAL else 0

    def _cut_wal(self) -> None:
        (patience_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        self._connection.execute(f"PRAGMA busy_timeout={READERS_WAIT_MS}")
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._connection.execute(f"PRAGMA busy_timeout={patience_ms}")

    def size_bytes(self) -> int | None:
        sizes = [_size(self.path.with_name(self.path.name + suffix)) for suffix in ("", "-wal")]
        return sum(size for size in sizes if size is not None) if sizes[0] is not None else None

    def close(self) -> None:
        self._connection.close()
        self._lock.release()

    def release(self) -> None:
        """Let another controller have the file although the writer hangs in it."""
        self._lock.release()


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        raise StoreError(str(exc)) from exc


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


class JournalReader(Reader):
    """Reads a file from a connection of its own per query."""

    _remedy = "check its disk"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._uri = f"{path.absolute().as_uri()}?mode=ro"

    def _query(self, table: str, sql: str, arguments: Row) -> list[Row]:
        """Of a table that the file itself holds: reading it ends with the file, and with a deadline."""
        try:
            _refuse_special_files(self._path)
            with contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
                _bound(connection)
                if connection.execute(_IS_STORED, (table,)).fetchone() is None:
                    raise self._unreadable(f"it has no table {table}")
                return connection.execute(sql, arguments).fetchall()
        except OSError as exc:
            raise self._unreadable(exc.strerror or str(exc)) from exc
        except (sqlite3.Error, MemoryError) as exc:
            raise self._unreadable(str(exc) or "too large") from exc
