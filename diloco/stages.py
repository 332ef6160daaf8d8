"""Where the time of a round goes: CPU and wall time of this process by stage, summed up since it started.

The time of a stage is that of the thread that runs it. Stages do not nest, so that their sum is no more than the
process took; what is left of the process's CPU time is HTTP, the event loop and all else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """What is done with a whole model, at either end."""

    CAPTURE = "capture"
    """An island copies its parameters."""
    ENCODE = "encode"
    """Contributions at islands, published parameters at the synchronizer."""
    DIGEST = "digest"
    """Of bytes that travel."""
    SEND = "send"
    """An island's requests that carry a contribution."""
    RECEIVE = "receive"
    """An island's requests for parameters."""
    DECODE = "decode"
    """Deltas at islands."""
    ADOPT = "adopt"
    STORE = "store"
    """Contributions, to disk."""
    CHECK = "check"
    """Whether a contribution is finite and near enough to be taken."""
    MERGE = "merge"
    """Decode contributions, add them up, take the outer step, and check what it made."""
    SEAL = "seal"
    """Digests of a generation's parts."""
    PERSIST = "persist"
    """The generation, to disk."""
    READ = "read"
    """Parameters that islands pull, from disk."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a stage took so far."""

    cpu_s: float = 0.0
    wall_s: float = 0.0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)


class Stages:
    """The account of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = dict.fromkeys(Stage, Spent())

    @contextmanager
    def of(self, stage: Stage) -> Iterator[None]:
        """Count the block as a part of that stage."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            with self._lock:
                before = self._spent[stage]
                self._spent[stage] = Spent(before.cpu_s + cpu_s, before.wall_s + wall_s)

    def spent(self) -> dict[Stage, Spent]:
        with self._lock:
            return dict(self._spent)


STAGES = Stages()
"""Of this process."""
