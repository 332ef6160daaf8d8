"""Transfers beside a server go between its requests: before each chunk they wait for a lull, while there is time.

Of the time that is left before the deadline, the chunks that are left need some, taken as `MARGIN` times what the last
one took, or as half of all while that is not known. The rest is shared out among them, and each may wait for a part of
its own share:

    wait at most  SHARE · (left - MARGIN · chunks · last chunk) / chunks

Each chunk asks anew, so that the later it is, the less it waits; once the time is short it does not wait at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

POLL_S = 0.002
MARGIN = 2.0
UNKNOWN_SHARE = 0.5
SHARE = 0.25
"""The other islands of the round wait too. Beside a server that never rests one chunk waits for a quarter of the spare
time, ten together for half of it."""


class GateState(Protocol):
    """What a gate says."""

    @property
    def busy(self) -> bool: ...


class Gate(Protocol):
    """What tells whether the server is busy; what is not known is busy."""

    def read(self, now_s: float, /) -> GateState: ...


def longest_wait_s(left_s: float, *, num_chunks: int, chunk_s: float | None) -> float:
    """How long to wait for a lull before the next of ``num_chunks`` chunks, ``left_s`` before the deadline (pure).

    ``chunk_s`` is what the last chunk took; None while there was none.
    """
    needed_s = UNKNOWN_SHARE * left_s if chunk_s is None else MARGIN * num_chunks * chunk_s
    return max(SHARE * (left_s - needed_s) / max(num_chunks, 1), 0.0)


class Lulls:
    """The gate of the server beside a transfer thread."""

    def __init__(self, gate: Gate, *, clock: Callable[[], float]) -> None:
        """``clock`` is that of the gate: `time.monotonic`."""
        self._gate = gate
        self._clock = clock
        self.waited_s = 0.0
        """In all."""

    def wait(self, longest_s: float, *, pause: Callable[[float], bool]) -> None:
        """Return when the server has nothing to do, or when the time is over, or when ``pause`` says so.

        ``pause`` sleeps that long; True when there is no reason to wait on.
        """
        started_s = now_s = self._clock()
        while (left_s := started_s + longest_s - now_s) > 0 and self._gate.read(now_s).busy:
            if pause(min(POLL_S, left_s)):
                break
            now_s = self._clock()
        self.waited_s += now_s - started_s
