"""A Unix clock that never jumps: leases and budgets must not end because somebody set the time.

What other hosts stamp follows the clocks of the hosts. When this host's own is set, the controller goes on in its time
and takes the correction over at the edge: what comes in is moved by it, and so is what goes out. A restart starts at
the host's time again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from controller.schema import Autonomy, Directive, Heartbeat
from diloco.schema import Progress, SyncReport
from service.wire import Record

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
R = TypeVar("R", bound=Record)

RESTART_TIMES = ("last_sign_s", "detected_s", "fenced_s", "fetched_s", "loaded_s", "first_step_s")
NOTICED_S = 1.0
"""Less is within what hosts differ by anyway, and samples are forgiven (`controller.samples`)."""


class HostClock:
    """Unix time as of the start, carried on by the monotonic clock; knows how far the host's has been set since."""

    def __init__(self, *, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()
        self._correction_s = 0.0

    def __call__(self) -> float:
        return self._offset_s + self._monotonic()

    def correction_s(self) -> float:
        """Seconds by which the host's clock is ahead of this one because it was set; constant until it is set again."""
        ahead_s = self._wall() - self()
        if abs(ahead_s - self._correction_s) > NOTICED_S:
            logger.warning(
                "the host's clock was set by_s=%.1f; times in the journal and in views stay on the clock of the start"
                " until a restart",
                ahead_s - self._correction_s,
            )
            self._correction_s = ahead_s
        return self._correction_s


def steady_clock() -> HostClock:
    """The clock of this host."""
    return HostClock()


def correction_of(clock: Clock) -> float:
    """Seconds from the controller's time to the host's; 0 for a clock that nobody can set."""
    return clock.correction_s() if isinstance(clock, HostClock) else 0.0


def moved(record: R, by_s: float, *names: str) -> R:
    """The record with these times, where it has them, ``by_s`` seconds later."""
    times_s = {name: getattr(record, name) for name in names}
    return record.model_copy(update={name: t_s + by_s for name, t_s in times_s.items() if t_s is not None})


def not_ahead(record: R, now_s: float, *names: str, with_them: str | None = None) -> R:
    """The record with these times, and another one, so much earlier that none of them is after ``now_s``.

    For what was noted down by a clock that ran ahead and has been set right since: waiting until then helps nobody.
    """
    ahead_s = max((getattr(record, name) or 0.0) - now_s for name in names)
    if ahead_s <= 0:
        return record
    return moved(record, -ahead_s, *names, *(() if with_them is None else (with_them,)))


def directive_at(directive: Directive, correction_s: float) -> Directive:
    """As the agents' clocks have it."""
    if correction_s == 0.0:
        return directive
    return moved(directive, correction_s, "t_s", "not_before_s", "deadline_s", "close_by_s")


def autonomy_at(autonomy: Autonomy, correction_s: float) -> Autonomy:
    """As the agents' clocks have it."""
    return autonomy if correction_s == 0.0 else moved(autonomy, correction_s, "until_s")


def progress_at(progress: Progress, correction_s: float) -> Progress:
    """As the agents' clocks have it."""
    return progress if correction_s == 0.0 else moved(progress, correction_s, "last_sync_at_s")


def own_beat(beat: Heartbeat, correction_s: float) -> Heartbeat:
    """A heartbeat in the controller's time."""
    if correction_s == 0.0:
        return beat
    progress = None if beat.progress is None else progress_at(beat.progress, -correction_s)
    syncs = [_own_report(report, correction_s) for report in beat.syncs]
    restarts = [moved(restart, -correction_s, *RESTART_TIMES) for restart in beat.restarts]
    changes = {"progress": progress, "syncs": syncs, "restarts": restarts}
    return moved(beat, -correction_s, "t_s").model_copy(update=changes)


def _own_report(report: SyncReport, correction_s: float) -> SyncReport:
    return moved(report, -correction_s, "started_s", "pushed_s", "finished_s")
