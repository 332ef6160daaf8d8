"""SLO accounts from latency histograms.

With the objective ``latency <= T`` and cumulative buckets, the violations among n observations are n - count(le = T):
exact when T is an edge. Between the edges ``lo < T < hi`` they lie between n - count(hi), the certain violations, and
n - count(lo). For ``itl`` an observation is a token, for ``ttft`` and ``e2e`` it is a request.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from service.errors import InputError
from sidecar.schema import SloWindow
from sidecar.source.snapshot import Histogram

WINDOWS_S = (60.0, 300.0, 3600.0)
# Accounts are kept in bins of this length: memory is bounded whatever the scrape interval is.
BIN_S = 1.0
EXAMPLES = "write metric:threshold, such as e2e:200ms, ttft:0.5s or itl:50ms"
SYNTAX = re.compile(r"(?P<metric>[a-z0-9]+):(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>[a-zµ]*)", re.ASCII)
UNITS_S = {"ms": 1e-3, "s": 1.0}
MIN_THRESHOLD_S = 1e-6
MAX_THRESHOLD_S = 86_400.0


class SloMetric(StrEnum):
    """Latency that the objective is about; also the name of its histogram in a snapshot."""

    TTFT = "ttft"
    ITL = "itl"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Slo:
    """An objective: the latency is at most the threshold."""

    metric: SloMetric
    threshold_s: float

    def __str__(self) -> str:
        return f"{self.metric}:{self.threshold_s * 1e3:.3f}".rstrip("0").rstrip(".") + "ms"


def parse_slo(text: str) -> Slo:
    """The objective that ``text`` states.

    Raises:
        InputError: unknown metric, missing unit, or a threshold that is not between a microsecond and a day.
    """
    match = SYNTAX.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"{text!r} is not an objective", field="slo", remedy=EXAMPLES)
    if match["metric"] not in set(SloMetric):
        known = ", ".join(SloMetric)
        raise InputError(f"metric {match['metric']!r} is not one of {known}", field="slo", remedy=EXAMPLES)
    if match["unit"] not in UNITS_S:
        given = repr(match["unit"]) if match["unit"] else "missing"
        raise InputError(f"the threshold's unit is {given}, not ms or s", field="slo", remedy=EXAMPLES)
    threshold_s = float(match["number"]) * UNITS_S[match["unit"]]
    if not MIN_THRESHOLD_S <= threshold_s <= MAX_THRESHOLD_S:
        raise InputError(
            f"threshold {threshold_s:g} s is not between a microsecond and a day", field="slo", remedy=EXAMPLES
        )
    return Slo(SloMetric(match["metric"]), threshold_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the observations of one interval stand against the objective."""

    requests: float
    violations: float
    """Certain violations."""
    violations_upper: float
    """Possible violations."""
    edges_s: tuple[float, float]
    """The edges next to the threshold: equal when it is on one; 0 and infinity where there is none."""

    @property
    def exact(self) -> bool:
        return self.edges_s[0] == self.edges_s[1]


def judge(observed: Histogram, threshold_s: float) -> Verdict:
    """The verdict on a histogram of one interval."""
    below_s, above_s = nearest_edges(observed.edges, threshold_s)
    return Verdict(
        requests=observed.count,
        violations=observed.count - observed.at_most(above_s),
        violations_upper=observed.count - observed.at_most(below_s),
        edges_s=(below_s, above_s),
    )


def nearest_edges(edges: tuple[float, ...], threshold_s: float) -> tuple[float, float]:
    """The edges below and above the threshold, equal when one is the threshold."""
    for edge in edges:
        if math.isclose(edge, threshold_s, rel_tol=1e-9):
            return edge, edge
    below = max((edge for edge in edges if edge < threshold_s), default=0.0)
    above = min((edge for edge in edges if edge > threshold_s), default=math.inf)
    return below, above


@dataclass(slots=True)
class Bin:
    """Sums over one second."""

    start_s: float
    requests: float = 0.0
    violations: float = 0.0
    violations_upper: float = 0.0


class SloAccounts:
    """Verdicts of the last hour, summed over sliding windows. Time is monotonic and passed in."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque()
        self.edges_s: tuple[float, float] | None = None

    def add(self, verdict: Verdict, *, now_s: float) -> None:
        start_s = math.floor(now_s / BIN_S) * BIN_S
        if not self._bins or self._bins[-1].start_s < start_s:
            self._bins.append(Bin(start_s))
        current = self._bins[-1]
        current.requests += verdict.requests
        current.violations += verdict.violations
        current.violations_upper += verdict.violations_upper
        self.edges_s = verdict.edges_s
        while self._bins[0].start_s <= now_s - WINDOWS_S[-1] - BIN_S:
            self._bins.popleft()

    def windows(self, *, now_s: float) -> tuple[SloWindow, ...]:
        return tuple(self._sum(window_s, now_s=now_s) for window_s in WINDOWS_S)

    def _sum(self, window_s: float, *, now_s: float) -> SloWindow:
        bins = [b for b in self._bins if b.start_s > now_s - window_s]
        requests = sum(b.requests for b in bins)
        violations = sum(b.violations for b in bins)
        return SloWindow(
            window_s=window_s,
            requests=round(requests),
            violations=round(violations),
            violations_upper=round(sum(b.violations_upper for b in bins)),
            attainment_frac=1.0 - violations / requests if requests > 0 else None,
        )
