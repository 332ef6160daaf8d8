"""The journal's file: tables, opening with clear errors, the lock, and everything that is read back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from controller.records import RoundEntry
from controller.schema import Action, DecisionRecord, Reason, Recovery, RecoveryRecord
from service.errors import ConfigError, ConflictError, UnavailableError
from service.files import check_regular, open_regular
from service.wire import Wire
from sidecar.schema import LoadSample

SCHEMA_VERSION = 1
APPLICATION_ID = 0x57444C43
"""Marks our files ("WDLC"). Journals from before it are known by their tables, and marked when they are opened."""
_UNMARKED_TABLES = frozenset(
    {"meta", "agents", "servers", "rounds", "directives", "budget", "policy", "samples", "decisions"}
)

_STATE_NAMES = ("meta", "agents", "servers", "rounds", "directives", "budget", "policy")
STATE_TABLES = {
    name: f"INSERT OR REPLACE INTO {name} (key, body) VALUES (?, ?)"  # noqa: S608
    for name in _STATE_NAMES
}
"""Tables with one row per key, and the statement that sets it."""

LOG_TABLES = {
    "samples": "INSERT INTO samples (server_id, t_s, body) VALUES (?, ?, ?)",
    "decisions": "INSERT OR REPLACE INTO decisions (id, t_s, policy, action, reason, round, slots, terms, slot, shadow)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "recoveries": "INSERT INTO recoveries (t_s, slot, agent_id, kind, body) VALUES (?, ?, ?, ?, ?)",
}
"""Tables that grow with time, and the statement that adds a row."""

_LOG_DDL = """
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY, server_id TEXT NOT NULL, t_s REAL NOT NULL, body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS samples_by_time ON samples (t_s);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, policy TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL,
    round INTEGER NOT NULL, slots TEXT NOT NULL, terms TEXT NOT NULL, slot INTEGER, shadow INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS decisions_by_time ON decisions (t_s);
CREATE TABLE IF NOT EXISTS recoveries (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, slot INTEGER, agent_id TEXT NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS recoveries_by_time ON recoveries (t_s);
"""
_DDL = _LOG_DDL + "".join(
    f"CREATE TABLE IF NOT EXISTS {name} (key TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;\n"
    for name in _STATE_NAMES
)

_LATER_COLUMNS = {"slot": "slot INTEGER", "shadow": "shadow INTEGER NOT NULL DEFAULT 0"}
"""Of decisions: journals from before them get them when they are opened."""
_PAGES = {
    "decisions": ("id", "t_s, policy, action, reason, round, slots, terms, slot, shadow"),
    "samples": ("id", "body"),
    "rounds": ("CAST(key AS INTEGER)", "body"),
    "recoveries": ("id", "body"),
}
"""Tables that are read page by page: what numbers their rows, and their other columns."""

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

M = TypeVar("M", bound=BaseModel)


class SampleRow(Wire):
    """One sample of the log, with the number to page by."""

    id: int
    sample: LoadSample


PageRow = DecisionRecord | RoundEntry | RecoveryRecord | SampleRow
"""Each has an ``id``."""


class Lock:
    """One controller per journal: two would hand out the same rounds."""

    def __init__(self, path: Path) -> None:
        lock_path = path.with_name(path.name + ".lock")
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
    """Open or make the journal for writing.

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
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    marks = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={SCHEMA_VERSION};"
    connection.executescript(f"BEGIN IMMEDIATE; {_DDL} {marks} COMMIT;")
    present = {str(row[1]) for row in connection.execute("PRAGMA table_info(decisions)")}
    for name, column in _LATER_COLUMNS.items():
        if name not in present:
            connection.execute(f"ALTER TABLE decisions ADD COLUMN {column}")
    # A full disk may still take the tables' few pages; find out now, not with the first round.
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('probe', hex(zeroblob(65536)))")
    connection.execute("DELETE FROM meta WHERE key = 'probe'")


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


def _unreadable(why: str) -> UnavailableError:
    return UnavailableError(f"cannot be read: {why}", field="--journal", remedy="check its disk")


class JournalReader:
    """Reads from a connection of its own; every call may block, so run it in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._uri = f"{path.absolute().as_uri()}?mode=ro"

    def values(self, table: str, model: type[M], *, newest: int = -1) -> list[M]:
        """All rows of a state table, or the ``newest`` ones of a table whose keys are numbers."""
        assert table in STATE_TABLES
        query = f"SELECT body FROM {table} ORDER BY CAST(key AS INTEGER) DESC LIMIT ?"  # noqa: S608
        rows = self._query(table, query, (newest,))
        try:
            return [model.model_validate_json(str(body)) for (body,) in rows]
        except ValidationError as exc:
            raise _unreadable_row(table, exc) from exc

    def meta(self) -> dict[str, str]:
        return {str(key): str(body) for key, body in self._query("meta", "SELECT key, body FROM meta", ())}

    def last_decision_id(self) -> int:
        ((last,),) = self._query("decisions", "SELECT coalesce(max(id), 0) FROM decisions", ())
        assert isinstance(last, int)
        return last

    def page(self, table: str, *, since: int, limit: int) -> list[PageRow]:
        """At most ``limit`` rows of a log, or of ``rounds``, with an id over ``since``, in the order of their ids.

        Raises:
            UnavailableError: it cannot be read.
            ConfigError: a newer version wrote a row.
        """
        number, others = _PAGES[table]
        query = f"SELECT {number}, {others} FROM {table} WHERE {number} > ? ORDER BY {number} LIMIT ?"  # noqa: S608
        try:
            return [_READERS[table](row) for row in self._query(table, query, (since, limit))]
        except ValueError as exc:
            raise _unreadable_row(table, exc) from exc

    def last_of_page(self, table: str, *, since: int, limit: int) -> int:
        """The highest ``id`` of `page`; ``since`` when that is empty."""
        number, _ = _PAGES[table]
        page = f"SELECT {number} AS id FROM {table} WHERE {number} > ? ORDER BY {number} LIMIT ?"  # noqa: S608
        query = f"SELECT coalesce(max(id), ?) FROM ({page}) AS page"  # noqa: S608
        ((last,),) = self._query(table, query, (since, since, limit))
        assert isinstance(last, int)
        return last

    def last_id(self, table: str) -> int:
        """The highest ``id`` of a table; 0 when it is empty."""
        number, _ = _PAGES[table]
        ((last,),) = self._query(table, f"SELECT coalesce(max({number}), 0) FROM {table}", ())  # noqa: S608
        assert isinstance(last, int)
        return last

    def decisions(self, *, since: int, limit: int) -> list[DecisionRecord]:
        """Decisions with an id over ``since``, oldest first."""
        columns = "id, t_s, policy, action, reason, round, slots, terms, slot, shadow"
        query = f"SELECT {columns} FROM decisions WHERE id > ? ORDER BY id LIMIT ?"  # noqa: S608
        return [_to_decision(row) for row in self._query("decisions", query, (since, limit))]

    def samples(self, *, page: int = 5000) -> Iterator[LoadSample]:
        """Every sample, oldest first; a row that this version cannot read is left out."""
        last = 0
        query = "SELECT id, body FROM samples WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self._query("samples", query, (last, page)):
            for number, body in rows:
                if not isinstance(number, int) or number <= last:
                    raise _unreadable("samples are not in the order of their id")
                last = number
                with contextlib.suppress(ValidationError):
                    yield LoadSample.model_validate_json(str(body))

    def _query(self, table: str, sql: str, arguments: tuple[object, ...]) -> list[tuple[object, ...]]:
        """All rows, of a table that the file itself holds: reading it ends with the file, and with a deadline."""
        try:
            _refuse_special_files(self._path)
            with contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
                _bound(connection)
                if connection.execute(_IS_STORED, (table,)).fetchone() is None:
                    raise _unreadable(f"it has no table {table}")
                return connection.execute(sql, arguments).fetchall()
        except OSError as exc:
            raise _unreadable(exc.strerror or str(exc)) from exc
        except (sqlite3.Error, MemoryError) as exc:
            raise _unreadable(str(exc) or "too large") from exc


def decision_row(decision: DecisionRecord) -> tuple[object, ...]:
    return (
        decision.id,
        decision.t_s,
        decision.policy,
        decision.action.value,
        decision.reason.value,
        decision.round,
        json.dumps(decision.slots),
        json.dumps(decision.terms),
        decision.slot,
        decision.shadow,
    )


def recovery_row(recovery: Recovery) -> tuple[object, ...]:
    return recovery.t_s, recovery.slot, recovery.agent_id or "", recovery.kind.value, recovery.model_dump_json()


def _to_recovery(row: tuple[object, ...]) -> RecoveryRecord:
    number, body = row
    return RecoveryRecord.model_validate(json.loads(str(body)) | {"id": number})


def _to_sample(row: tuple[object, ...]) -> SampleRow:
    number, body = row
    return SampleRow.model_validate({"id": number, "sample": json.loads(str(body))})


def _unreadable_row(table: str, exc: ValueError) -> ConfigError:
    why = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else str(exc)
    return ConfigError(
        f"table {table} has a row that this version cannot read: {why}",
        field="--journal",
        remedy="use the version that wrote it, or name another file",
    )


def _to_decision(row: tuple[object, ...]) -> DecisionRecord:
    number, t_s, policy, action, reason, round_, slots, terms, slot, shadow = row
    return DecisionRecord.model_validate(
        {
            "id": number,
            "t_s": t_s,
            "policy": policy,
            "action": Action(str(action)),
            "reason": Reason(str(reason)),
            "round": round_,
            "slots": tuple(json.loads(str(slots))),
            "terms": json.loads(str(terms)),
            "slot": slot,
            "shadow": bool(shadow),
        }
    )


_READERS: dict[str, Callable[[tuple[object, ...]], PageRow]] = {
    "decisions": _to_decision,
    "samples": _to_sample,
    "rounds": lambda row: RoundEntry.model_validate_json(str(row[1])),
    "recoveries": _to_recovery,
}
