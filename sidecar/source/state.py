"""The state of the engine, from the outcomes of its scrapes (pure).

    refused                  → STARTING until the first good page, DOWN afterwards
    no series of the prefix  → METRICS_DISABLED
    good page                → DRAINING | SLEEPING | STALLED | READY
    anything else            → the state holds until no page was good for ``stale_after_s``, then STALE

A time-out is no refusal: a saturated server is slow, and nothing but a refusal makes it DOWN.

DRAINING is a server whose pages are good while its ``/health`` says 503: it takes no more requests, because its engine
died or because what stands before it says so. vLLM's own drain (``--shutdown-timeout``) cannot be seen: tried on 0.32,
``/health`` and ``/metrics`` answer 200 until the last request is done, then the port refuses. Nor can a pause: it is
not exported, and while paused or asleep new requests do not raise ``waiting``. A pause that keeps its requests becomes
STALLED after a minute, one without requests looks idle.

A frozen engine keeps its last gauges while its HTTP server answers: STALLED is requests in the engine while the step
and token counters are flat for `STALL_AFTER_S`. An idle engine has flat counters too, and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sidecar.schema import EngineState
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome, ScrapeResult

# A prefill of a very long prompt is one step of many seconds; a minute without a step has not been seen in health.
STALL_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What is known about the engine after the scrapes so far."""

    state: EngineState
    since_s: float
    """Unix time since which the state holds."""
    last_good_monotonic_s: float
    """Last good page, or the start of the sidecar before the first."""
    seen_ready: bool = False
    accepts: bool = True
    """What the server last said about taking requests."""
    progress: tuple[float | None, ...] = ()
    progress_monotonic_s: float = 0.0
    """When the counters of progress last changed, or the engine was last empty."""


def initial_status(*, t_s: float, monotonic_s: float) -> EngineStatus:
    return EngineStatus(state=EngineState.STARTING, since_s=t_s, last_good_monotonic_s=monotonic_s)


def advance(status: EngineStatus, result: ScrapeResult, *, stale_after_s: float) -> EngineStatus:
    """The status after one more scrape."""
    if result.accepts is not None or result.outcome is ScrapeOutcome.REFUSED:
        status = replace(status, accepts=result.accepts is not False)
    if result.snapshot is not None:
        status = _note_page(status, result.snapshot)
        state = _state_of_page(status, result.snapshot)
        status = replace(status, seen_ready=status.seen_ready or state is EngineState.READY)
    elif result.outcome is ScrapeOutcome.REFUSED:
        state = EngineState.DOWN if status.seen_ready else EngineState.STARTING
    elif result.outcome is ScrapeOutcome.NO_SERIES:
        state = EngineState.METRICS_DISABLED
    elif result.monotonic_s - status.last_good_monotonic_s > stale_after_s:
        state = EngineState.STALE
    else:
        state = status.state
    return status if state is status.state else replace(status, state=state, since_s=result.t_s)


def _note_page(status: EngineStatus, page: EngineSnapshot) -> EngineStatus:
    moved = page.progress != status.progress or not page.in_engine
    return replace(
        status,
        last_good_monotonic_s=page.monotonic_s,
        progress=page.progress,
        progress_monotonic_s=page.monotonic_s if moved else status.progress_monotonic_s,
    )


def _state_of_page(status: EngineStatus, page: EngineSnapshot) -> EngineState:
    if not status.accepts:
        return EngineState.DRAINING
    if page.asleep:
        return EngineState.SLEEPING
    can_tell = any(counter is not None for counter in page.progress)
    if can_tell and page.monotonic_s - status.progress_monotonic_s >= STALL_AFTER_S:
        return EngineState.STALLED
    return EngineState.READY
