"""Rows go into SQLite as one by one, in few statements."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from controller.journal_rows import ROWS_AT_ONCE, write_rows


@pytest.mark.parametrize("num", [0, 1, 2, 3, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 1000])
def test_every_row_is_written_once_and_in_order(num: int) -> None:
    rows = [(f"key-{number}", 0.1 * number, None) for number in range(num)]
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, key TEXT, t_s REAL, note TEXT)")
        statements: list[str] = []
        database.set_trace_callback(statements.append)
        write_rows(database, "log", ("key", "t_s", "note"), rows)
        database.set_trace_callback(None)
        assert database.execute("SELECT key, t_s, note FROM log ORDER BY id").fetchall() == rows
    inserts = [statement for statement in statements if statement.startswith("INSERT")]
    assert len(inserts) <= num // ROWS_AT_ONCE + ROWS_AT_ONCE.bit_length()


def test_of_one_key_the_last_row_stays() -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE state (key TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID")
        write_rows(database, "state", ("key", "body"), [("a", "1"), ("b", "2"), ("a", "3")])
        assert database.execute("SELECT * FROM state ORDER BY key").fetchall() == [("a", "3"), ("b", "2")]


def test_a_row_that_lacks_a_column_is_an_error() -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE state (key TEXT, body TEXT)")
        with pytest.raises(sqlite3.ProgrammingError):
            write_rows(database, "state", ("key", "body"), [("a",)])
