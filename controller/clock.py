"""A Unix clock that never jumps: leases and budgets must not end because somebody set the time."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock() -> Clock:
    """Unix time as of now, carried on by the monotonic clock."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()
