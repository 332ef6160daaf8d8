"""How much processor time a copy took away from the inner step beside it.

Where the step has fewer threads than there are cores for the process, the copy has a core of its own, and what the
inner loop lacked is the time that it waited for a core meanwhile (Linux counts that per thread). Otherwise all of the
copy's time is the step's.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


class StolenTime:
    """Of one thread, which is the one that calls `begin`."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._waited_s: float | None = None

    def begin(self) -> None:
        self._waited_s = self._read()

    def end(self, *, cpu_s: float) -> float:
        """What was taken since `begin` by a copy that ran for ``cpu_s``; from any thread."""
        before, now = self._waited_s, self._read()
        if before is None or now is None or _num_cores() <= self._threads:
            return cpu_s
        return min(max(now - before, 0.0), cpu_s)

    def _read(self) -> float | None:
        """Time for which the thread was ready and had no core."""
        try:
            return int(self._path.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
