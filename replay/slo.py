"""Whether a request, as its client saw it, met the service level objective.

A request that failed, for whatever reason, violates every objective: the user got no answer.
"""

from __future__ import annotations

from replay.loadgen import RequestResult
from sidecar.slo import Slo, SloMetric


def violates(result: RequestResult, slo: Slo) -> bool:
    """Whether the request missed the objective."""
    latency_s = latency(result, slo.metric)
    return latency_s is None or latency_s > slo.threshold_s


def latency(result: RequestResult, metric: SloMetric) -> float | None:
    """The judged latency in seconds; None when the request failed."""
    if not result.ok:
        return None
    match metric:
        case SloMetric.TTFT:
            return result.ttft_s
        case SloMetric.E2E:
            return result.e2e_s
        case SloMetric.ITL:
            # The longest gap of the answer; one token has no gap, so it cannot miss a bound on gaps.
            return max(result.itl_s, default=0.0)
