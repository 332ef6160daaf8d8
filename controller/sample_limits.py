"""Which load samples cannot be true. Pure; the wire model has already refused what is no finite number, or negative.

A count of what is there has one limit. A count over an interval of t seconds may reach ``at once + per second * t``:
far more than any server does, far less than nonsense, which would otherwise stay in sums and charts for good. A sample
that is cut short by its interval (scrapes are never shorter than some milliseconds) is judged by the share "at once".
"""

from __future__ import annotations

from sidecar.schema import LoadSample

MAX_REQUESTS = 1e6
"""In one engine at a time; the largest run some thousands."""
REQUESTS_PER_S, REQUESTS_AT_ONCE = 1e5, 1e6
"""Of one server. "At once" is what a proxy may let loose after an outage."""
TOKENS_PER_S, TOKENS_AT_ONCE = 1e8, 1e10
MAX_INTERVAL_S = 1e6
MAX_LATENCY_S = 1e6
MAX_VIOLATIONS = 1e7
MAX_POINTS = 1000
"""Forecast horizons and start times; a sidecar tells some dozens."""

LEVELS = ("running", "waiting", "waiting_capacity")
REQUEST_COUNTS = (
    "arrivals",
    "finished",
    "preemptions",
    "rejections",
    "slo_requests",
    "slo_violations",
    "slo_violations_upper",
)
TOKEN_COUNTS = ("prompt_tokens", "generation_tokens")
LATENCIES = ("ttft_mean_s", "itl_mean_s", "e2e_mean_s")
LIMITS: tuple[tuple[str, float, float], ...] = (
    ("interval_s", MAX_INTERVAL_S, 0.0),
    *((name, MAX_REQUESTS, 0.0) for name in LEVELS),
    *((name, REQUESTS_AT_ONCE, REQUESTS_PER_S) for name in REQUEST_COUNTS),
    *((name, TOKENS_AT_ONCE, TOKENS_PER_S) for name in TOKEN_COUNTS),
    *((name, MAX_LATENCY_S, 0.0) for name in LATENCIES),
    ("sync_cost_per_s", MAX_VIOLATIONS, 0.0),
)
"""Field, at once, and per second of the interval."""


def find_absurd(sample: LoadSample) -> str | None:
    """The first field whose value cannot be, and why; None for a sample that may be true."""
    interval_s = min(sample.interval_s or 0.0, MAX_INTERVAL_S)
    values = sample.__dict__  # a large fleet asks ten thousand times per second
    for name, at_once, per_s in LIMITS:
        value, limit = values[name], at_once + per_s * interval_s
        if value is not None and value > limit:
            return f"{name}: {value:g} is over {limit:g}, which cannot be"
    return _find_absurd_outlook(sample)


def _find_absurd_outlook(sample: LoadSample) -> str | None:
    for name in ("forecast", "sync_costs_ahead"):
        if len(getattr(sample, name)) > MAX_POINTS:
            return f"{name}: {len(getattr(sample, name))} points are over {MAX_POINTS}"
    for point in sample.forecast:
        if (
            point.arrivals_per_s > REQUESTS_AT_ONCE
            or point.arrivals_per_s_q50 > REQUESTS_AT_ONCE
            or point.arrivals_per_s_q90 > REQUESTS_AT_ONCE
            or (point.running or 0) > MAX_REQUESTS
            or (point.running_q90 or 0) > MAX_REQUESTS
        ):
            return f"forecast: {point.horizon_s:g} s ahead has more than any server does"
    for cost in sample.sync_costs_ahead:
        if cost.violations > MAX_VIOLATIONS:
            return f"sync_costs_ahead: {cost.violations:g} violations are over {MAX_VIOLATIONS:g}"
    return None
