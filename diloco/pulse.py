"""Tells the agent that this worker lives, from a thread of its own, and how long its inner loop has got nowhere.

The thread has normal priority and needs next to no time: a worker that computes slowly, waits for its gate or is paused
goes on saying so. One that is stopped (SIGSTOP) says nothing; one whose inner loop hangs says for how long it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from diloco.protocol import AliveEvent, Event

BEATS_PER_TIMEOUT = 5
LONGEST_BEAT_S = 1.0


class Pulse:
    """Of one rank. `begin_step` and `end_step` are for the thread of the inner loop."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        *,
        timeout_s: float,
        is_waiting: Callable[[], bool] = lambda: False,
        step_time_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``is_waiting``: a step that has begun waits for the gate."""
        self._emit = emit
        self._beat_s = min(timeout_s / BEATS_PER_TIMEOUT, LONGEST_BEAT_S)
        self._is_waiting = is_waiting
        self._step_time_s = step_time_s
        self._stop = threading.Event()
        self._begun_s: float | None = None
        """When the step under way began; None between steps."""
        self._steps = 0
        self.step = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def begin_step(self, step: int) -> None:
        self.step = step
        # What the first step takes says nothing: libraries are loaded, and memory is laid out.
        self._begun_s = time.monotonic() if self._steps else None

    def end_step(self) -> None:
        self._begun_s = None
        self._steps += 1

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            begun_s = self._begun_s
            if begun_s is not None and self._is_waiting():
                self._begun_s = begun_s = time.monotonic()
            self._emit(
                AliveEvent(
                    step=self.step,
                    still_s=0.0 if begun_s is None else max(time.monotonic() - begun_s, 0.0),
                    waits=begun_s is None or self._is_waiting(),
                    step_time_s=self._step_time_s(),
                )
            )
