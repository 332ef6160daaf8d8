"""When the garbage collector looks through the heap: never by itself, and every ten minutes right after a tick.

Samples of a large fleet are a quarter of a million containers, replaced every second and none of them in a cycle.
Whenever the collector counted enough of them it looked through all, in the middle of whatever went on: a tenth of a
second and more, every few seconds. Requests, ticks and samples end without it; what it finds are broken connections.
"""

from __future__ import annotations

import gc
import resource
import sys
import time

COLLECT_EVERY_S = 600.0
MOST_NEW = 2_000_000
"""Containers more than at the last collection, some 300 MB, before it is due earlier: ten thousand servers have a
quarter of a million, and broken connections by the thousand must not add up for ten minutes."""
MOST_GROWN_BYTES = 256 << 20
"""By which the process may have outgrown its largest size until the last collection: a request that is refused as no
JSON takes its body, of up to two megabytes, into a cycle of a few containers."""


def spare_heap() -> None:
    """Let the collector rest, and leave out for good what lives as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(0)


class Collections:
    """Those that a process makes whose collector rests."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._peak_bytes = _peak_bytes()

    def collect_if_due(self) -> None:
        """At a quiet moment: of ten thousand servers it takes a quarter of a second."""
        if gc.get_threshold()[0] != 0:
            return
        if self._is_due(time.monotonic()):
            gc.collect()
            self._last_s, self._peak_bytes = time.monotonic(), _peak_bytes()

    def _is_due(self, now_s: float) -> bool:
        return (
            now_s - self._last_s >= COLLECT_EVERY_S
            or gc.get_count()[0] >= MOST_NEW
            or _peak_bytes() - self._peak_bytes >= MOST_GROWN_BYTES
        )


def _peak_bytes() -> int:
    """The largest size of the process in memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
