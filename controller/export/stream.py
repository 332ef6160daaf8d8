"""An export from the journal's pages to the bytes of a file, page by page: memory holds one page at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from controller.export.columns import Table
from controller.export.csv_text import csv_header, csv_rows
from controller.export.parquet import parquet_file
from controller.export.rows import Value, to_row
from controller.journal_reader import PageRow
from controller.records import RoundEntry
from service.extras import require_extra

PAGE_ROWS = 5_000
"""Also the rows of a Parquet row group. A page of samples takes some 50 ms to read and 10 MB to hold."""
MAX_ROWS = 10_000_000
DEFAULT_ROWS = 1_000_000

Page = list[tuple[Value, ...]]


class Format(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"


MEDIA_TYPES = {Format.CSV: "text/csv; charset=utf-8; header=present", Format.PARQUET: "application/vnd.apache.parquet"}


class Reader(Protocol):
    """Where rows come from (the journal's reader)."""

    def page(self, table: str, *, since: int, limit: int) -> Sequence[PageRow]: ...

    def last_of_page(self, table: str, *, since: int, limit: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    table: Table
    format: Format
    since: int = 0
    limit: int = DEFAULT_ROWS

    @property
    def file_name(self) -> str:
        return f"wadiloco-{self.table}-{self.since}.{self.format}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One that is ready to be written. May block: run it in a thread."""

    reader: Reader
    request: Request
    next_since: int
    """Highest id that it has: pass as ``since`` to get what came later."""
    on_rows: Callable[[int], None]
    """Called with the number of rows of each page."""

    def pieces(self) -> Iterator[bytes]:
        """The file. Raises `UnavailableError` or `ConfigError` when the journal cannot be read any more."""
        table = self.request.table
        if self.request.format is Format.PARQUET:
            yield from parquet_file(table, self._pages())
            return
        yield csv_header(table)
        for page in self._pages():
            yield csv_rows(table, page)

    def _pages(self) -> Iterator[Page]:
        last = self.request.since
        while last < self.next_since:
            found = self.reader.page(self.request.table, since=last, limit=PAGE_ROWS)
            if not found:
                return  # Old rows were dropped meanwhile.
            last = max(last + 1, found[-1].id)
            rows = [to_row(self.request.table, record) for record in found if record.id <= self.next_since]
            self.on_rows(len(rows))
            yield rows


def open_export(reader: Reader, request: Request, *, on_rows: Callable[[int], None]) -> Export:
    """Find out where it ends. May block.

    Raises:
        UnavailableError: the journal cannot be read, or the format needs a package that is not installed.
        ConfigError: a newer version wrote a round.
    """
    if request.format is Format.PARQUET:
        require_extra("export")
    end = reader.last_of_page(request.table, since=request.since, limit=request.limit)
    if request.table is Table.ROUNDS:
        end = _before_open(reader, request.since, end)
    return Export(reader=reader, request=request, next_since=end, on_rows=on_rows)


def _before_open(reader: Reader, since: int, end: int) -> int:
    """The last round before the first that is still open."""
    last = since
    while last < end:
        found = reader.page(Table.ROUNDS, since=last, limit=PAGE_ROWS)
        for entry in found:
            if entry.id > end or (isinstance(entry, RoundEntry) and entry.closed_s is None):
                return last
            last = max(last, entry.id)
        if not found:
            break
    return last
