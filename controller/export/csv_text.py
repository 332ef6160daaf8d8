"""CSV by RFC 4180: a header, CRLF, quotes doubled. Empty is unknown.

Names come from agents and sidecars, and a spreadsheet takes a text that begins with one of ``= + - @`` (or a tab or
line break before it) for a formula. Such a text gets an apostrophe in front, as OWASP recommends. Numbers are left as
they are.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from controller.export.columns import COLUMNS, Kind, Table, names_of
from controller.export.rows import Value

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are full-width forms, which some spreadsheets take for the plain ones."""
MAX_TIME_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def csv_header(table: Table) -> bytes:
    return _write([names_of(table)])


def csv_rows(table: Table, rows: Iterable[Sequence[Value]]) -> bytes:
    kinds = [column.kind for column in COLUMNS[table]]
    return _write([[_cell(value, kind) for value, kind in zip(row, kinds, strict=True)] for row in rows])


def _write(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    return text.getvalue().encode()


def _cell(value: Value, kind: Kind) -> str:
    if value is None:
        return ""
    if kind is Kind.TIME:
        return iso_time(float(value))
    if kind is Kind.BOOLEAN:
        return "true" if value else "false"
    if kind is Kind.TEXT:
        return guard_formula(str(value))
    return repr(value) if isinstance(value, float) else str(value)


def guard_formula(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def iso_time(unix_s: float) -> str:
    """UTC with milliseconds; empty for what no calendar has."""
    if not 0 <= unix_s <= MAX_TIME_S:
        return ""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
