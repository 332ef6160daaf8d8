"""How long this process stood still: stopped, swapped out, or its machine paused.

Agents could not be heard in that time, so it counts against none of them. Short of three heartbeats it costs nobody a
lease, and is not told. What lies between two signs of life anyway is no standing still: it counts, so that nobody who
is gone keeps a lease however often this process stands still.
"""

from __future__ import annotations

import time

from controller.clock import Clock


class Stalls:
    """Measures the time between two signs of life of the event loop."""

    def __init__(self, *, monotonic: Clock = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ran_s = monotonic()

    def note(self, *, due_s: float, least_s: float) -> float:
        """A sign of life, due ``due_s`` seconds after the one before; how late it is, 0 if less than ``least_s``."""
        now_s = self._monotonic()
        stood_s, self._ran_s = now_s - self._ran_s - due_s, now_s
        return stood_s if stood_s >= least_s else 0.0
