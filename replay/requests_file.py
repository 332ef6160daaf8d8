"""``requests.jsonl`` of a run: what became of each request, one a line, in the fields of `RequestResult`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from replay.loadgen import RequestResult
from service.errors import InputError, UnavailableError

REQUESTS = "requests.jsonl"
LINE = TypeAdapter(RequestResult)


def write_requests(directory: Path, results: Iterable[RequestResult]) -> None:
    """Write the file into a run's directory, whole or not at all.

    Raises:
        UnavailableError: no space, or no permission.
    """
    path = directory / REQUESTS
    partial = path.with_name(f".{path.name}.partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.writelines(LINE.dump_json(result) + b"\n" for result in results)
        partial.replace(path)
    except OSError as exc:
        raise UnavailableError(
            f"cannot write {path}: {exc.strerror or exc}", field="out", remedy="free space or choose another --out"
        ) from exc


def read_requests(path: Path) -> list[RequestResult]:
    """What `write_requests` wrote.

    Raises:
        InputError: it cannot be read, or a line is no request.
    """
    try:
        with path.open("rb") as file:
            return [LINE.validate_json(line) for line in file]
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror or exc}", field="replay") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "line"
        raise InputError(
            f"{path} has a line that is no request: {where}: {first['msg']}",
            field="replay",
            remedy="give the --out folder of this version's wadiloco replay",
        ) from exc
