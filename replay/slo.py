"""The service level objective of a replay: which latency of a request may not exceed which threshold.

A request that failed, for whatever reason, violates every objective: the user got no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from replay.loadgen import RequestResult
from service.errors import InputError

_PATTERN = re.compile(r"^(ttft|itl|e2e):(\d+(?:\.\d+)?)(ms|s)$")


class SloMetric(StrEnum):
    """Which latency is judged."""

    TTFT = "ttft"
    """Dispatch to first token."""
    ITL = "itl"
    """Longest gap between two token events of the answer."""
    E2E = "e2e"
    """Dispatch to last token."""


@dataclass(frozen=True, slots=True)
class Slo:
    metric: SloMetric
    threshold_ms: float

    def __str__(self) -> str:
        return f"{self.metric}:{self.threshold_ms:g}ms"


def parse_slo(text: str) -> Slo:
    """``e2e:200ms`` → `Slo`.

    Raises:
        InputError: not of this form, or a threshold of 0.
    """
    match = _PATTERN.match(text.strip().lower())
    threshold_ms = float(match[2]) * (1e3 if match[3] == "s" else 1.0) if match else 0.0
    if match is None or threshold_ms <= 0:
        raise InputError(
            f"{text!r} is not an objective",
            field="--slo",
            remedy="write METRIC:THRESHOLD, such as e2e:200ms, ttft:0.5s or itl:50ms",
        )
    return Slo(metric=SloMetric(match[1]), threshold_ms=threshold_ms)


def violates(result: RequestResult, slo: Slo) -> bool:
    """Whether the request missed the objective."""
    latency_s = latency(result, slo.metric)
    return latency_s is None or latency_s * 1e3 > slo.threshold_ms


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
            # One token has no gap, so it cannot miss a bound on gaps.
            return max(result.itl_s, default=0.0)
