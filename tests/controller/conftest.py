"""Where journals are kept in tests: a file, or a database of a real PostgreSQL server."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psycopg
import pytest

from controller.database_url import parse_database_url
from controller.journal import Journal
from controller.journal_file import JournalReader, SqliteStore
from controller.journal_postgres import Database, PostgresStore
from controller.journal_reader import Reader
from controller.journal_store import Store
from controller.journal_tables import decision_row
from controller.schema import Action, DecisionRecord, Reason
from tests.controller.postgres import Server


def decision(number: int, t_s: float = 1.0, **fields: object) -> DecisionRecord:
    base = {"policy": "wa_diloco", "action": Action.DEFER, "reason": Reason.MIN_GAP, "round": 3, "slots": (0, 1)}
    return DecisionRecord.model_validate({"id": number, "t_s": t_s, "terms": {"score": -0.25}, **base, **fields})


def append_decisions(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        journal.append("decisions", decision_row(decision(number, t_s=float(number))))


class Place(Protocol):
    """One journal of one kind of database."""

    def open_store(self) -> Store: ...

    def reader(self) -> Reader: ...

    def execute(self, statement: str) -> None:
        """Beside the journal."""

    def break_writes(self) -> Callable[[], None]:
        """Make every write fail at once, until what is returned is called."""


class FilePlace:
    def __init__(self, path: Path) -> None:
        self.path = path

    def open_store(self) -> SqliteStore:
        store = SqliteStore(self.path)
        store._connection.execute("PRAGMA busy_timeout=10")
        return store

    def reader(self) -> JournalReader:
        return JournalReader(self.path)

    def execute(self, statement: str) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(statement)

    def break_writes(self) -> Callable[[], None]:
        other = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        return other.close


class DatabasePlace:
    def __init__(self, url: str) -> None:
        self.url = url
        self.database = Database(parse_database_url(url))
        self._readers: list[Reader] = []

    def open_store(self) -> PostgresStore:
        """As the leader of the term that there is."""
        with psycopg.connect(self.url) as connection:
            found = connection.execute("SELECT term FROM wadiloco.leader").fetchone()
        assert found is not None
        return PostgresStore(self.database, term=found[0])

    def reader(self) -> Reader:
        self._readers.append(self.database.reader())
        return self._readers[-1]

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url, options="-c search_path=wadiloco") as connection:
            connection.execute(statement.encode())

    def break_writes(self) -> Callable[[], None]:
        self.execute("ALTER TABLE leader RENAME TO leader_away")
        return lambda: self.execute("ALTER TABLE leader_away RENAME TO leader")

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


@pytest.fixture
def database(postgres_server: Server) -> Iterator[DatabasePlace]:
    place = DatabasePlace(postgres_server.url(postgres_server.make_database()))
    yield place
    place.close()
    if not postgres_server.is_up:
        postgres_server.start()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return FilePlace(tmp_path / "journal.sqlite")
    found: DatabasePlace = request.getfixturevalue("database")
    return found
