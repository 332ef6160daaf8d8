"""How long this process stood still: stopped, swapped out, or its machine paused.

Agents could not be heard in that time, so it counts against none of them. Short of three heartbeats it costs nobody a
lease, and is not told.
"""

from __future__ import annotations

import time

from controller.clock import Clock


class Stalls:
    """Measures the time between two signs of life of the event loop."""

    def __init__(self, *, monotonic: Clock = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ran_s = monotonic()

    def note(self, *, least_s: float) -> float:
        """A sign of life; seconds since the one before where they are ``least_s`` or more, else 0."""
        now_s = self._monotonic()
        stood_s, self._ran_s = now_s - self._ran_s, now_s
        return stood_s if stood_s >= least_s else 0.0
