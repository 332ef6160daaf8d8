"""The interface between the journal and the database that keeps it.

A store is used by one writer thread. It does one thing per call and knows no queue, no retry and no event loop; what
goes wrong is a `StoreError`, whatever the driver called it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel

from controller.journal_reader import Reader
from controller.journal_tables import Row

State = dict[str, dict[str, BaseModel | str | None]]
"""Table → key → newest value; models are immutable, None takes the key out."""


class StoreError(Exception):
    """The database did not do it; it may later."""


class FencedError(StoreError):
    """Another controller leads since: this one must never write again."""


@dataclass(slots=True)
class Batch:
    """What one transaction writes."""

    number: int
    """Running number of the process; a batch that is tried again has the same."""
    target: int
    """How many submissions are done once it is written."""
    state: State = field(default_factory=dict)
    log: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.state.values())) + sum(map(len, self.log.values()))

    def kept(self, table: str) -> dict[str, str]:
        """Bodies of a state table by key. Written out here and not when they were queued: of a round that a thousand
        islands report, once."""
        return {
            key: value if isinstance(value, str) else value.model_dump_json()
            for key, value in self.state[table].items()
            if value is not None
        }

    def gone(self, table: str) -> list[str]:
        """Keys of a state table that are taken out."""
        return [key for key, value in self.state[table].items() if value is None]


class Store(Protocol):
    """One database, opened for writing."""

    @property
    def name(self) -> str:
        """For messages; holds no password."""

    @property
    def remedy(self) -> str:
        """What an operator looks at when it fails."""

    def reader(self) -> Reader:
        """Reads beside the writer, from any thread, until the store is closed."""

    def write(self, batch: Batch) -> None:
        """Write all of it or nothing. Where a failure can leave open which, a batch that was written is known by its
        number, and not written again."""

    def prune(self, table: str, before_s: float, *, limit: int) -> int:
        """Drop at most ``limit`` of the oldest rows of a log; how many it were.

        The newest row stays: the next one's number is one higher, and readers go on by numbers.
        """

    def tidy(self) -> bool:
        """Give some of the space of what was dropped back; whether there is more to do."""

    def size_bytes(self) -> int | None:
        """What it takes on disk; None when that cannot be told."""

    def close(self) -> None: ...

    def release(self) -> None:
        """Let another controller have it although the writer hangs in it; called from another thread."""
