"""The alarm about signals that the server should export and does not: a version of vLLM that renamed a series."""

from __future__ import annotations

import logging
import math

from sidecar.source.snapshot import EngineSnapshot

logger = logging.getLogger(__name__)

# What stays missing is told again after this time: loud, and no flood when pages with and without it alternate.
REPEAT_S = 600.0


class SignalAlarm:
    """What the newest good page lacks; logged when it begins, every `REPEAT_S` while it lasts, and when it ends."""

    def __init__(self) -> None:
        self.missing: tuple[str, ...] = ()
        self._told_s: dict[str, float] = {}

    def check(self, page: EngineSnapshot) -> None:
        now_s = page.monotonic_s
        due = [signal for signal in page.missing if now_s - self._told_s.get(signal, -math.inf) >= REPEAT_S]
        if due:
            self._told_s.update(dict.fromkeys(due, now_s))
            logger.warning(
                "the server does not export the signals %s: they are unknown, never 0; is its vLLM newer than this "
                "sidecar, or its --metric-prefix another?",
                ", ".join(due),
            )
        if self.missing and not page.missing:
            logger.info("the server exports all signals again")
        self.missing = page.missing
