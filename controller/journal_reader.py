"""Everything that is read back from the journal, the same from each database."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from controller.journal_tables import (
    LOG_TABLES,
    ROUND_NUMBER,
    STATE_TABLES,
    Row,
    to_decision,
    to_recovery,
)
from controller.records import RoundEntry
from controller.schema import DecisionRecord, RecoveryRecord
from service.errors import ConfigError, UnavailableError
from service.wire import Wire
from sidecar.schema import LoadSample

M = TypeVar("M", bound=BaseModel)

ALL = 2**62
"""As a limit: more rows than any table has."""


class SampleRow(Wire):
    """One sample of the log, with the number to page by."""

    id: int
    sample: LoadSample


PageRow = DecisionRecord | RoundEntry | RecoveryRecord | SampleRow
"""Each has an ``id``."""

DECISION_COLUMNS = ", ".join(LOG_TABLES["decisions"])
PAGES = {
    "decisions": (f"SELECT {DECISION_COLUMNS} FROM decisions", "id"),  # noqa: S608 - our own names
    "samples": ("SELECT id, body FROM samples", "id"),
    "recoveries": ("SELECT id, body FROM recoveries", "id"),
    "rounds": (f"SELECT {ROUND_NUMBER}, body FROM rounds", ROUND_NUMBER),  # noqa: S608
}
"""Tables that can be paged: what is read, and what it is ordered by."""


class Reader(ABC):
    """Every call may block, so run it in a thread."""

    @abstractmethod
    def _query(self, table: str, sql: str, arguments: Row) -> list[Row]:
        """All rows of a query on one table.

        Raises:
            UnavailableError: it cannot be read.
        """

    @property
    @abstractmethod
    def _remedy(self) -> str:
        """What to do about a database that cannot be read."""

    def values(self, table: str, model: type[M], *, newest: int = ALL) -> list[M]:
        """All rows of a state table in the order of their keys; of rounds the ``newest``, newest first."""
        assert table in STATE_TABLES
        order = f"{ROUND_NUMBER} DESC" if table == "rounds" else "key"
        rows = self._query(table, f"SELECT body FROM {table} ORDER BY {order} LIMIT ?", (newest,))  # noqa: S608
        try:
            return [model.model_validate_json(str(body)) for (body,) in rows]
        except ValidationError as exc:
            raise unreadable_row(table, exc) from exc

    def meta(self) -> dict[str, str]:
        return {str(key): str(body) for key, body in self._query("meta", "SELECT key, body FROM meta", ())}

    def decisions(self, *, since: int, limit: int) -> list[DecisionRecord]:
        """Decisions with an id over ``since``, oldest first."""
        return [row for row in self.page("decisions", since=since, limit=limit) if isinstance(row, DecisionRecord)]

    def page(self, table: str, *, since: int, limit: int) -> list[PageRow]:
        """At most ``limit`` rows of a log, or of ``rounds``, with an id over ``since``, in the order of their ids.

        Raises:
            UnavailableError: it cannot be read.
            ConfigError: a newer version wrote a row.
        """
        read: dict[str, Callable[[Row], PageRow]] = {
            "decisions": to_decision,
            "samples": lambda row: SampleRow(id=_number(row[0]), sample=LoadSample.model_validate_json(str(row[1]))),
            "recoveries": to_recovery,
            "rounds": lambda row: RoundEntry.model_validate_json(str(row[1])),
        }
        try:
            return [read[table](row) for row in self._page(table, since=since, limit=limit)]
        except (ValueError, TypeError, RecursionError) as exc:  # TypeError: JSON of another kind than was written
            raise unreadable_row(table, exc) from exc

    def last_of_page(self, table: str, *, since: int, limit: int) -> int:
        """The highest ``id`` of `page`; ``since`` when that is empty."""
        _, number = PAGES[table]
        page = f"SELECT {number} AS id FROM {table} WHERE {number} > ? ORDER BY {number} LIMIT ?"  # noqa: S608
        query = f"SELECT coalesce(max(id), ?) FROM ({page}) AS page"  # noqa: S608
        return self._number(table, query, (since, since, limit))

    def last_id(self, table: str) -> int:
        """The highest ``id`` of a table; 0 when it is empty."""
        _, number = PAGES[table]
        return self._number(table, f"SELECT coalesce(max({number}), 0) FROM {table}", ())  # noqa: S608

    def before_newest(self, table: str, limit: int) -> int:
        """The ``since`` that pages the newest ``limit`` rows: ids may have holes, and the last be unwritten as yet."""
        _, number = PAGES[table]
        query = f"SELECT {number} FROM {table} ORDER BY {number} DESC LIMIT 1 OFFSET ?"  # noqa: S608
        return self._number(table, f"SELECT coalesce(({query}), 0)", (limit,))

    def samples(self, *, page: int = 5000) -> Iterator[LoadSample]:
        """Every sample, oldest first; a row that this version cannot read is left out."""
        last = 0
        while rows := self._page("samples", since=last, limit=page):
            for number, body in rows:
                if not isinstance(number, int) or number <= last:
                    raise self._unreadable("samples are not in the order of their id")
                last = number
                with contextlib.suppress(ValidationError):
                    yield LoadSample.model_validate_json(str(body))

    def sample_ids_since(self, t_s: float) -> tuple[int, int]:
        """The ids of the first sample from about this time on, and of the last of all; (1, 0) when there is none."""
        rows = self._query("samples", "SELECT id FROM samples WHERE t_s >= ? ORDER BY t_s LIMIT 1", (t_s,))
        return (_number(rows[0][0]), self.last_id("samples")) if rows else (1, 0)

    def samples_of(self, server_ids: Collection[str], *, after: int, until: int) -> list[str]:
        """Samples of these servers with ``after`` < id <= ``until`` in the order of their ids, as they were written."""
        query = "SELECT server_id, body FROM samples WHERE id > ? AND id <= ? ORDER BY id"
        rows = self._query("samples", query, (after, until))
        return [str(body) for server_id, body in rows if server_id in server_ids]

    def close(self) -> None:
        """Let go of its connections; it may be read from again."""
        return

    def _page(self, table: str, *, since: int, limit: int) -> list[Row]:
        select, number = PAGES[table]
        return self._query(table, f"{select} WHERE {number} > ? ORDER BY {number} LIMIT ?", (since, limit))

    def _number(self, table: str, sql: str, arguments: Row) -> int:
        ((number,),) = self._query(table, sql, arguments)
        return _number(number)

    def _unreadable(self, why: str) -> UnavailableError:
        return UnavailableError(f"cannot be read: {why}", field="--journal", remedy=self._remedy)


def unreadable_row(table: str, exc: Exception) -> ConfigError:
    why = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else str(exc)
    return ConfigError(
        f"table {table} has a row that this version cannot read: {why}",
        field="--journal",
        remedy="use the version that wrote it, or name another file",
    )


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
