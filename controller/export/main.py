"""``wadiloco export``: a table of a run as a file, from a controller or from its journal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import httpx
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from controller.export.api import NEXT_SINCE_HEADER
from controller.export.config import ExportSettings
from controller.export.stream import Request, open_export
from controller.journal_file import JournalReader
from service.client import refusal
from service.errors import ConfigError, UnavailableError
from service.files import replace_file
from service.leader import ask_leader
from service.log import configure_logging
from service.peers import split_urls
from service.settings import load_settings


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ExportSettings, argv)
    configure_logging(settings.log_level)
    with _progress(settings) as progress:
        next_since = _from_journal(settings, progress) if settings.journal else _from_controller(settings, progress)
    result = {
        "table": settings.table,
        "format": settings.chosen_format,
        "out": str(settings.out),
        "num_bytes": progress.num_bytes,
        "next_since": next_since,
    }
    if settings.as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(f"{settings.out}: {progress.num_bytes} bytes; go on with --since {next_since}\n")
    return 0


class Counted:
    """Counts the bytes that pass, and shows them."""

    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, detail="")
        self.num_bytes = 0

    def through(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.num_bytes += len(piece)
            self._bar.update(self._task, detail=f"{self.num_bytes / 1e6:.1f} MB")
            yield piece


@contextmanager
def _progress(settings: ExportSettings) -> Iterator[Counted]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield Counted(bar, f"export {settings.table}")


def _from_journal(settings: ExportSettings, progress: Counted) -> int:
    assert settings.journal is not None
    if not settings.journal.is_file():
        raise ConfigError(f"{settings.journal} is not a file", field="journal", remedy="name a controller's journal")
    request = Request(table=settings.table, format=settings.chosen_format, since=settings.since, limit=settings.limit)
    export = open_export(JournalReader(settings.journal), request, on_rows=lambda _: None)
    _write(settings, progress.through(export.pieces()))
    return export.next_since


def _from_controller(settings: ExportSettings, progress: Counted) -> int:
    assert settings.controller is not None
    path = f"/v1/export/{settings.table}.{settings.chosen_format}"
    query = {"since": settings.since, "limit": settings.limit}
    try:
        urls = split_urls(settings.controller)
        with ask_leader(
            settings, urls, "GET", path, timeout_s=settings.timeout_s, field="controller", params=query
        ) as response:
            if response.is_error:
                response.read()
                raise refusal(response, field="controller")
            next_since = response.headers.get(NEXT_SINCE_HEADER, "")
            if not next_since.isdigit():
                raise UnavailableError(f"the answer has no {NEXT_SINCE_HEADER}", field="controller")
            _write(settings, progress.through(response.iter_bytes()))
    except httpx.HTTPError as exc:
        raise UnavailableError(f"{type(exc).__name__}: {exc}", field="controller") from exc
    return int(next_since)


def _write(settings: ExportSettings, pieces: Iterator[bytes]) -> None:
    try:
        replace_file(settings.out, pieces, follow_links=True)
    except OSError as exc:
        raise UnavailableError(
            f"{settings.out} cannot be written: {exc.strerror or exc}", field="out", remedy="name another file"
        ) from exc
