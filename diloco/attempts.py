"""How a request is tried again, and how long one attempt may take."""

from __future__ import annotations

import random

import httpx

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0


class Backoff:
    """Exponential pauses, each drawn from its upper half so that islands do not retry in step."""

    def __init__(self) -> None:
        self._ceiling_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        ceiling_s, self._ceiling_s = self._ceiling_s, min(2 * self._ceiling_s, BACKOFF_MAX_S)
        return random.uniform(0.5, 1.0) * ceiling_s


def bounded(timeout: httpx.Timeout, left_s: float, extra_wait_s: float) -> httpx.Timeout:
    """The client's timeout, longer by what the peer was asked to wait, and never beyond the deadline."""

    def bound(value_s: float | None, extra_s: float = 0.0) -> float:
        return left_s if value_s is None else min(value_s + extra_s, left_s)

    return httpx.Timeout(
        connect=bound(timeout.connect),
        read=bound(timeout.read, extra_wait_s),
        write=bound(timeout.write),
        pool=bound(timeout.pool),
    )
