"""What one ``/metrics`` page of a vLLM server says, and how the attempt to read it ended.

A series that is not on the page is ``None``, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative buckets as Prometheus exports them: ``cumulative[i]`` observations were at most ``edges[i]``."""

    edges: tuple[float, ...]
    """Ascending ``le`` values of the page; the last is infinite."""
    cumulative: tuple[float, ...]
    total: float
    """Sum of the observed values."""

    @property
    def count(self) -> float:
        return self.cumulative[-1]

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    def at_most(self, edge: float) -> float:
        """Observations that were at most ``edge``; below the first edge that is none of them for certain."""
        known = [count for le, count in zip(self.edges, self.cumulative, strict=True) if le <= edge]
        return known[-1] if known else 0.0


class Judged(NamedTuple):
    """Finished requests that were held, one by one, against all objectives of the SLO."""

    requests: float
    violations: float
    """Requests that certainly missed one."""
    violations_upper: float
    """Requests that may have missed one."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One page, summed over the engines of the server."""

    t_s: float
    """Unix time of the scrape."""
    monotonic_s: float
    """The same moment on a clock that never jumps: intervals are measured on it."""
    num_engines: int = 1
    running: float | None = None
    waiting: float | None = None
    waiting_capacity: float | None = None
    """Of those that wait, the ones that wait for room in the engine; others wait for a LoRA slot or a KV transfer."""
    kv_usage_mean_frac: float | None = None
    kv_usage_max_frac: float | None = None
    kv_capacity_tokens: float | None = None
    asleep: bool | None = None
    steps: float | None = None
    finished: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    rejections: float | None = None
    ttft: Histogram | None = None
    itl: Histogram | None = None
    tpot: Histogram | None = None
    """Per finished request, 0 for an answer of one token."""
    e2e: Histogram | None = None
    judged: Judged | None = None
    """Only the plugin knows single requests."""
    process_start_s: float | None = None
    created_s: float | None = None
    """When the oldest engine created its token counter; on the clock of the source, which stays the same."""
    exact: bool = False
    """Made of the plugin's records: its counters began at another moment than those of the page."""
    writers: frozenset[object] = frozenset()
    """Who counted, where that is not the page: totals of other writers are no sequel to these."""
    signals: Mapping[str, str | None] = field(default_factory=dict)
    """Signal → the series that matched it."""
    missing: tuple[str, ...] = ()
    """Signals that the sidecar needs and the server does not export."""

    @property
    def in_engine(self) -> float | None:
        """Requests in the engine: running and waiting."""
        return None if self.running is None or self.waiting is None else self.running + self.waiting

    @property
    def progress(self) -> tuple[float | None, ...]:
        """Counters of which at least one moves whenever the engine works."""
        return self.steps, self.prompt_tokens, self.generation_tokens


class ScrapeOutcome(StrEnum):
    """How a scrape ended. Exported as a metric label."""

    OK = "ok"
    NO_SERIES = "no_series"
    """An answer without one series of the prefix."""
    TIMEOUT = "timeout"
    """No whole page within the time: the server is saturated, or drips."""
    REFUSED = "refused"
    """Nobody listens there."""
    UNREACHABLE = "unreachable"
    """No such name, no route, no permission."""
    TLS = "tls"
    """No TLS session: the certificates do not fit, or the other side speaks no TLS."""
    UNAUTHORIZED = "unauthorized"
    """401 or 403, or the token cannot be read."""
    REDIRECTED = "redirected"
    """An answer that points elsewhere, where the sidecar does not go."""
    HTTP_ERROR = "http_error"
    """Any other status than 200."""
    BROKEN = "broken"
    """The connection broke before the answer was complete, or the answer is no HTTP."""
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    INTERNAL = "internal"
    """The sidecar itself failed on this page."""


@dataclass(frozen=True, slots=True)
class ScrapeResult:
    """One attempt to read the page. ``snapshot`` is there exactly when the outcome is OK."""

    outcome: ScrapeOutcome
    t_s: float
    monotonic_s: float
    duration_s: float
    snapshot: EngineSnapshot | None = None
    accepts: bool | None = None
    """Whether the server says that it takes requests (its ``/health``); None when it was not asked, or did not say."""
    detail: str = ""
    """What failed."""
    remedy: str = ""
    """What the user can do about it."""
    page_outcome: ScrapeOutcome | None = None
    """How the scrape ended where the plugin's account stands in for the page that is not there."""

    @property
    def explanation(self) -> str:
        """Both in one line."""
        return "; ".join(filter(None, (self.detail, self.remedy)))


def finite(value: float) -> float | None:
    """``value``, or None when it is NaN or infinite."""
    return value if math.isfinite(value) else None
