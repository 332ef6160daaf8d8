"""Whether a request, as its client saw it, met the service level objectives: all of them, or it violates.

A request that failed, for whatever reason, violates: the user got no answer. The client sees every gap of an answer, so
that ``itl`` bounds the longest; a sidecar, whose server tells the mean of a finished request only, judges by that.
"""

from __future__ import annotations

from replay.loadgen import RequestResult
from sidecar.slo import Slo, SloMetric


def violates(result: RequestResult, slo: Slo) -> bool:
    """Whether the request missed any of the objectives."""
    return any(misses(latency(result, objective.metric), objective.threshold_s) for objective in slo.objectives)


def misses(latency_s: float | None, threshold_s: float) -> bool:
    return latency_s is None or latency_s > threshold_s


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
        case SloMetric.TPOT:
            return mean_time_per_output_token(result)


def mean_time_per_output_token(result: RequestResult) -> float | None:
    """Over the tokens after the first; 0 for an answer of one. Without a count of tokens each event is one."""
    if result.ttft_s is None or result.e2e_s is None:
        return None
    num_gaps = len(result.itl_s) if result.output_tokens is None else result.output_tokens - 1
    return (result.e2e_s - result.ttft_s) / num_gaps if num_gaps > 0 else 0.0
