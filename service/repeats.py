"""Failures that come again with every tick: told whole once, then counted, with a line a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

LINE_EVERY_S = 60.0


@dataclass(slots=True)
class _Told:
    at_s: float
    since: int = 0
    """How often it came since that line."""


class Repeats:
    """Logs errors of one part of a process. The same is what has the same message and type."""

    def __init__(self, logger: logging.Logger, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._monotonic = monotonic
        self._told: dict[tuple[str, type[BaseException]], _Told] = {}

    def error(self, message: str, exc: BaseException) -> None:
        """Tell of an error that was caught; ``message`` is one of a few and has no free text in it."""
        now_s = self._monotonic()
        told = self._told.get((message, type(exc)))
        if told is None:
            self._told[message, type(exc)] = _Told(now_s)
            self._logger.error(message, exc_info=exc)
            return
        told.since += 1
        if now_s - told.at_s >= LINE_EVERY_S:
            self._logger.error("%s, still: %d times since error=%s: %s", message, told.since, type(exc).__name__, exc)
            told.at_s, told.since = now_s, 0
