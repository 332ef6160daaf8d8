"""What the log says of the server: engine and scrapes when they change, and signals that it should export and does not.

A signal is missing where a version of vLLM renamed its series.
"""

from __future__ import annotations

import logging
import math

from sidecar.schema import EngineState
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome, ScrapeResult

logger = logging.getLogger(__name__)

# What stays missing is told again after this time: loud, and no flood when pages with and without it alternate.
REPEAT_S = 600.0
TROUBLE = frozenset({EngineState.DOWN, EngineState.STALE, EngineState.STALLED, EngineState.METRICS_DISABLED})
PASSING = frozenset({ScrapeOutcome.OK, ScrapeOutcome.REFUSED, ScrapeOutcome.TIMEOUT})
"""How scrapes end at a start, a stop or under much load; if it lasts, the state says so. The others want somebody."""


class ScrapeNews:
    """Logs each change of the engine's state, and of how its scrapes end; a warning where somebody has to act."""

    def __init__(self) -> None:
        self._outcome: ScrapeOutcome | None = None

    def check(self, result: ScrapeResult, *, state: EngineState, was: EngineState) -> None:
        outcome, last = result.page_outcome or result.outcome, self._outcome
        self._outcome = outcome
        detail = f" detail={result.explanation}" if result.explanation else ""
        if state is not was:
            level = logging.WARNING if state in TROUBLE or outcome not in PASSING else logging.INFO
            logger.log(level, "engine state=%s was=%s scrape=%s%s", state, was, outcome, detail)
        elif outcome is not last:
            level = logging.INFO if outcome in PASSING else logging.WARNING
            news = "first scrape" if last is None else f"scrapes end otherwise was={last}"
            logger.log(level, "%s outcome=%s engine=%s%s", news, outcome, state, detail)


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
