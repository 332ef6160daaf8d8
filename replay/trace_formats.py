"""The file formats of public LLM traces, read line by line.

| format | file | time | lengths |
|---|---|---|---|
| azure | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` | ISO 8601, up to 7 fractional digits, zone optional | tokens |
| burstgpt | CSV `Timestamp,Model,Request tokens,Response tokens,…` | seconds | tokens; a response of 0 has failed |
| mooncake | JSONL `{"timestamp", "input_length", "output_length"}` | milliseconds | tokens |
| plain | JSONL `{"arrival_s", "input_tokens", "output_tokens"}` | seconds | tokens |
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.errors import InputError
from service.files import open_regular

MAX_LINE_BYTES = 1 << 20
"""A Mooncake line of a prompt of a million tokens has some 20 KB; a file without line ends is not a trace."""
MAX_TOKENS = 1_000_000_000

Lines = Iterator[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a trace file."""

    line: int
    time_s: float
    """On the clock of the file."""
    input_tokens: int
    output_tokens: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    fields: tuple[str, str, str]
    """Names of time, input length and output length."""
    is_csv: bool
    parse_time: Callable[[Any], float]
    """Seconds; raises ValueError or TypeError."""
    zero_output_failed: bool = False

    def rows(self, path: Path, lines: Lines) -> Iterator[Row]:
        records = _csv_records(self, path, lines) if self.is_csv else _json_records(self, path, lines)
        for line, (time, input_length, output_length) in records:
            output_tokens = _tokens(output_length, self.fields[2], path, line)
            yield Row(
                line,
                self._time_s(time, path, line),
                _tokens(input_length, self.fields[1], path, line),
                output_tokens,
                failed=self.zero_output_failed and output_tokens == 0,
            )

    def _time_s(self, value: Any, path: Path, line: int) -> float:
        try:
            time_s = self.parse_time(value)
        except (ValueError, TypeError, OverflowError):
            time_s = math.nan
        if not (math.isfinite(time_s) and time_s >= 0):
            raise _fault(path, line, self.fields[0], f"{value!r} is not a time of 0 or later", "correct this line")
        return time_s


def read_lines(path: Path) -> Lines:
    """Numbered lines of a text file, blank ones left out.

    Raises:
        InputError: no such file, a directory, not text.
    """
    try:
        # Its format is found by reading it twice, and an open pipe would wait for ever.
        with os.fdopen(open_regular(path), "rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(raw) > MAX_LINE_BYTES:
                    raise _fault(path, number, None, f"is longer than {MAX_LINE_BYTES} bytes", "is it a trace?")
                line = _decode(path, number, raw)
                if line:
                    yield number, line
    except OSError as exc:
        raise InputError(
            f"cannot be read: {exc.strerror or exc}", field=str(path), remedy="--trace needs a readable, regular file"
        ) from exc


def detect_format(path: Path) -> Format:
    """The format that the first line of the file speaks.

    Raises:
        InputError: an empty file, or none of the known formats.
    """
    first = next(read_lines(path), None)
    if first is None:
        raise InputError("is empty", field=str(path), remedy="choose a trace with requests")
    number, line = first
    is_json = line.startswith("{")
    found = _json_object(path, number, line).keys() if is_json else {name.strip() for name in line.split(",")}
    for candidate in FORMATS.values():
        if candidate.is_csv is not is_json and found >= set(candidate.fields):
            return candidate
    kind = "fields" if is_json else "columns"
    raise _fault(path, number, None, f"unknown trace format; its {kind} are {_shorten(', '.join(found))}", _REMEDY)


def _csv_records(source: Format, path: Path, lines: Lines) -> Iterator[tuple[int, tuple[str, str, str]]]:
    header_line, header = next(lines, (1, ""))
    columns = [name.strip() for name in header.split(",")]
    missing = [name for name in source.fields if name not in columns]
    if missing:
        raise _fault(path, header_line, missing[0], f"no such column in a {source.name} trace", _REMEDY)
    time_at, input_at, output_at = (columns.index(name) for name in source.fields)
    width = max(time_at, input_at, output_at) + 1
    for line, text in lines:
        row = next(csv.reader((text,))) if '"' in text else text.split(",")
        if len(row) < width:
            absent = next(name for name in source.fields if columns.index(name) >= len(row))
            raise _fault(path, line, absent, "is missing", "complete or remove this line")
        yield line, (row[time_at], row[input_at], row[output_at])


def _json_records(source: Format, path: Path, lines: Lines) -> Iterator[tuple[int, tuple[Any, Any, Any]]]:
    time_field, input_field, output_field = source.fields
    for line, text in lines:
        record = _json_object(path, line, text)
        absent = next((name for name in source.fields if name not in record), None)
        if absent is not None:
            raise _fault(path, line, absent, f"is missing in a {source.name} trace", "complete or remove this line")
        yield line, (record[time_field], record[input_field], record[output_field])


def _json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _fault(path, line, None, f"is not JSON: {_shorten(text)}", "correct or remove this line") from exc
    if not isinstance(record, dict):
        raise _fault(path, line, None, f"is not a JSON object: {_shorten(text)}", "correct or remove this line")
    return record


def _tokens(value: Any, field: str, path: Path, line: int) -> int:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not (0 <= number <= MAX_TOKENS and number.is_integer()):
        shown = _shorten(repr(value))
        raise _fault(path, line, field, f"{shown} is not a whole number of tokens", "correct or remove this line")
    return int(number)


def _seconds(value: Any) -> float:
    return math.nan if isinstance(value, bool) else float(value)


def _milliseconds(value: Any) -> float:
    return _seconds(value) / 1e3


def _iso_seconds(value: Any) -> float:
    moment = datetime.fromisoformat(value.strip())
    # Azure's 2023 files have no zone, the 2024 ones have +00:00.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _decode(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as exc:
        raise _fault(path, number, None, "is not UTF-8 text", "unpack or convert the file first") from exc


def _fault(path: Path, line: int, field: str | None, message: str, remedy: str) -> InputError:
    where = f"line {line}: {field}: " if field else f"line {line}: "
    return InputError(where + message, field=str(path), remedy=remedy)


def _shorten(text: str, *, limit: int = 80) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


FORMATS = {
    known.name: known
    for known in (
        Format("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), True, _iso_seconds),
        Format("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), True, _seconds, zero_output_failed=True),
        Format("mooncake", ("timestamp", "input_length", "output_length"), False, _milliseconds),
        Format("plain", ("arrival_s", "input_tokens", "output_tokens"), False, _seconds),
    )
}
_REMEDY = "known: " + "; ".join(
    f"{known.name} ({'CSV' if known.is_csv else 'JSONL'} with {', '.join(known.fields)})" for known in FORMATS.values()
)
