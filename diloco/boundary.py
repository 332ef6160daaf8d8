"""Between two inner steps: where the transfer thread may have the module for a moment.

The transfer thread hands over what it wants done and waits; the inner loop does it when it comes to a step boundary. So
all that is long (encoding, uploads, waiting, downloads) runs beside the inner steps, and what needs them to stand still
is counted: `StepBoundary.blocked_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

from service.errors import UnavailableError

T = TypeVar("T")

POLL_S = 0.2


class Boundary(Protocol):
    """Does a piece of work when no inner step is under way."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def at_once(work: Callable[[], T]) -> T:
    """The boundary of those whose inner steps stand still anyway."""
    return work()


class StepBoundary:
    """Work that waits for the inner loop, one piece at a time."""

    def __init__(self, stop: threading.Event) -> None:
        """``stop`` says that the inner loop does not come back."""
        self.blocked_s = 0.0
        """Time for which inner steps stood still; whoever begins a sync sets it back."""
        self._stop = stop
        self._waiting: Callable[[], None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    def __call__(self, work: Callable[[], T]) -> T:
        """From the transfer thread: the result of the work, once the inner loop has done it.

        Raises:
            UnavailableError: the inner loop has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as exc:  # noqa: BLE001 (belongs to whoever waits for the result)
                future.set_exception(exc)

        self._waiting = run
        while not wait([future], timeout=POLL_S).done:
            if self._stop.is_set():
                raise UnavailableError("the inner loop has ended", field="worker")
        return future.result()

    def serve(self) -> None:
        """From the inner loop, between two steps: do what waits, if anything does."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.time(waiting)

    def time(self, work: Callable[[], T]) -> T:
        """Do work for which inner steps stand still."""
        started_s = time.perf_counter()
        try:
            return work()
        finally:
            self.blocked_s += time.perf_counter() - started_s
