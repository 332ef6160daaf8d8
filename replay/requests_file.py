"""``requests.jsonl`` of a run: what became of each request, one a line, in the fields of `RequestResult`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from replay.loadgen import RequestResult
from service.errors import InputError, UnavailableError
from service.files import open_regular, replace_file

REQUESTS = "requests.jsonl"
LINE = TypeAdapter(RequestResult)
REMEDY = "give the --out folder of this version's wadiloco replay"
MAX_LINE_BYTES = 16 << 20
"""A line has some 20 bytes per token of the answer."""
MAX_UNIX_S = 1e11
"""Beyond it (the year 5138) a time is not one in seconds."""
MAX_SPAN_S = 10 * 86_400.0
"""No run lasts longer, and no time within it either."""
UNIX_TIMES = ("sent_unix_s", "ended_unix_s")
RUN_TIMES = ("arrival_s", "sent_s", "ended_s", "ttft_s", "e2e_s", "itl_s")
"""From the start of the load, or lengths."""


def write_requests(directory: Path, results: Iterable[RequestResult]) -> None:
    """Write the file into a run's directory, whole or not at all.

    Raises:
        UnavailableError: no space, or no permission.
    """
    path = directory / REQUESTS
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, (LINE.dump_json(result) + b"\n" for result in results))
    except OSError as exc:
        raise UnavailableError(
            f"cannot write {path}: {exc.strerror or exc}", field="out", remedy="free space or choose another --out"
        ) from exc


def read_requests(path: Path) -> list[RequestResult]:
    """What `write_requests` wrote.

    Raises:
        InputError: it cannot be read, or a line is no request; names the line and its field.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return list(_requests(path, iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")))
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror or exc}", field="replay", remedy=REMEDY) from exc


def _requests(path: Path, lines: Iterable[bytes]) -> Iterator[RequestResult]:
    first_s, last_s = math.inf, -math.inf
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            raise _fault(path, number, "line", f"is longer than {MAX_LINE_BYTES} bytes")
        try:
            result = LINE.validate_json(line)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "line"
            raise _fault(path, number, where, str(first["msg"])) from exc
        _check_times(path, number, result)
        for name in UNIX_TIMES:
            time_s = getattr(result, name)
            first_s, last_s = min(first_s, time_s), max(last_s, time_s)
            if last_s - first_s > MAX_SPAN_S:
                raise _fault(path, number, name, f"{time_s:.10g} is over 10 days from another line")
        yield result


def _check_times(path: Path, number: int, result: RequestResult) -> None:
    for name in UNIX_TIMES:
        time_s = getattr(result, name)
        if not 0 <= time_s <= MAX_UNIX_S:
            raise _fault(path, number, name, f"{time_s:.10g} is no Unix time in seconds")
    for name in RUN_TIMES:
        value = getattr(result, name)
        for time_s in value if isinstance(value, tuple) else (value,):
            if time_s is not None and not abs(time_s) <= MAX_SPAN_S:
                raise _fault(path, number, name, f"{time_s:.10g} is no number of seconds within 10 days")


def _fault(path: Path, number: int, field: str, message: str) -> InputError:
    return InputError(
        f"{path} has a line that is no request: line {number}: {field}: {message}", field="replay", remedy=REMEDY
    )
