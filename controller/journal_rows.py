"""Many rows into SQLite with few statements.

A thread gives the interpreter up for each statement and has to get it back after it, for which it waits as long as
others compute: a thousand rows one by one are a thousand such waits, in a commit that a tick waits for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain

ROWS_AT_ONCE = 128
"""A power of two, as all smaller numbers of rows are made of: statements stay few, and prepared."""


def write_rows(
    connection: sqlite3.Connection, table: str, columns: tuple[str, ...], rows: Sequence[Sequence[object]]
) -> None:
    """Insert rows in order; of one key the last one stays."""
    at = 0
    while at < len(rows):
        num = min(ROWS_AT_ONCE, 1 << (len(rows) - at).bit_length() - 1)
        part = rows[at : at + num]
        connection.execute(_insert(table, columns, num), tuple(chain.from_iterable(part)))
        at += num


@cache
def _insert(table: str, columns: tuple[str, ...], num_rows: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    places = ", ".join([row] * num_rows)
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES {places}"  # noqa: S608 - our own names
