"""Settings of ``wadiloco export``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from controller.database_url import DatabaseUrl, read_journal
from controller.export.columns import Table
from controller.export.stream import DEFAULT_ROWS, MAX_ROWS, Format
from service.files import check_replaceable
from service.settings import PeerSettings, Urls

SUFFIXES = {f".{chosen}": chosen for chosen in Format}


class ExportSettings(PeerSettings):
    """Write a table of a run to a file for BI tools: from a controller, or from its journal."""

    service: ClassVar[str] = "export"

    table: Table
    """decisions, samples, rounds or recoveries."""
    journal: Path | None = None
    """SQLite journal of a controller, which may be running or not; one in PostgreSQL is read through --controller."""
    controller: Urls | None = None
    """URL of a controller, instead of its journal; or several with commas: the one that leads is asked."""
    out: Path
    """File to write; replaced whole."""
    format: Format | None = None
    """csv or parquet; left out, what the name of --out ends with."""
    since: int = Field(default=0, ge=0, lt=1 << 63)
    """Only rows with a higher id: the next_since of the last export."""
    limit: int = Field(default=DEFAULT_ROWS, ge=1, le=MAX_ROWS)
    """Most rows to write."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Longest wait for the controller's next bytes."""
    as_json: bool = False
    """Print the result as JSON; --json for short."""

    @field_validator("journal", mode="before")
    @classmethod
    def _check_journal(cls, value: object) -> object:
        read = read_journal(value)
        if isinstance(read, DatabaseUrl):
            raise ValueError("only a SQLite file is read here, not a database: give --controller URL instead")  # noqa: TRY004
        return read

    @field_validator("out")
    @classmethod
    def _check_out(cls, path: Path) -> Path:
        if str(path) == "-":
            raise ValueError("- is no file: who reads a pipe cannot tell a whole export from part of one; name a file")
        check_replaceable(path)
        return path

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.journal is None) == (self.controller is None):
            raise ValueError("give either --journal FILE or --controller URL")
        if self.journal is not None and os.path.realpath(self.out) in _files_of(self.journal):
            raise ValueError(f"out: {self.out} is the journal, or a file of it: name another one")
        if self.format is None and self.out.suffix not in SUFFIXES:
            raise ValueError(f"out: {self.out.name} ends with neither {' nor '.join(SUFFIXES)}; give --format too")
        return self

    @property
    def chosen_format(self) -> Format:
        if self.format is not None:
            return self.format
        return SUFFIXES[self.out.suffix]


def _files_of(journal: Path) -> set[str]:
    """A SQLite journal, what SQLite keeps beside it, and its lock."""
    real = os.path.realpath(journal)
    return {f"{real}{ending}" for ending in ("", "-wal", "-shm", "-journal", ".lock")}
