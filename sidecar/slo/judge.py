"""How observations stand against objectives: exact where that can be known, else bounds that hold.

One objective ``latency <= T``, cumulative buckets: the violations among n observations are n - count(le = T), exact
when T is an edge. Between the edges ``lo < T < hi`` they lie between n - count(hi), the certain ones, and
n - count(lo).

All objectives together, request by request (from the plugin's records): exact.

All objectives together, from histograms alone: with v_i violations of objective i among the same N requests, those that
violate any are between max v_i and min(N, Σ v_i) (Fréchet 1935). E2e and TPOT are observed when a request finishes, so
that their N is the same. TTFT is observed earlier, and a span of time sees F first tokens but N finished requests. When
at most D requests were in the engine as the span began, at most D of the finished ones had their first token before it,
and at most F - (N - D) of the first tokens belong to requests that did not finish in it. Hence the finished ones hold

    v_ttft - max(F - N + D, 0)   to   v_ttft + D

violations of TTFT. The error does not grow with the span: bounds are taken over the whole of it, not interval by
interval. ITL is observed per token; a request is judged by its mean, that is by the TPOT histogram.

A request is judged when its last objective is observed: at its first token where TTFT is all there is, else when it
finishes. One that the client gave up is judged only if vLLM counts it as finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.slo.objectives import Slo, SloMetric
from sidecar.source.snapshot import Histogram
from sidecar.source.window import Interval


class Bounds(NamedTuple):
    """Requests, and how many of them violated: certainly and possibly."""

    requests: float
    violations: float
    violations_upper: float


class Joint(NamedTuple):
    """One span of time against all objectives, as sums: those of two spans add up to those of both."""

    settled: float = 0.0
    """Requests whose bounds need nothing else."""
    settled_violations: float = 0.0
    settled_upper: float = 0.0
    finished: float = 0.0
    """Requests whose TTFT was counted apart, at the first token."""
    finished_violations: float = 0.0
    """Of the objectives other than TTFT."""
    finished_upper: float = 0.0
    first_tokens: float = 0.0
    ttft_violations: float = 0.0
    ttft_upper: float = 0.0

    def bounds(self, in_engine_before: float) -> Bounds:
        """``in_engine_before``: at most so many requests were in the engine as the span began; infinite if unknown."""
        unfinished = max(self.first_tokens - self.finished + in_engine_before, 0.0)
        low = max(self.finished_violations, self.ttft_violations - unfinished)
        high = min(self.finished, self.finished_upper + self.ttft_upper + in_engine_before)
        return Bounds(self.settled + self.finished, self.settled_violations + min(low, high), self.settled_upper + high)


class Together(NamedTuple):
    joint: Joint | None
    exact: bool = False
    ttft_apart: bool = False


UNKNOWN = Together(None)


class Verdict(NamedTuple):
    """How the observations of one interval stand against one objective."""

    observed: float
    """Requests; tokens for ITL."""
    violations: float
    """Certain violations."""
    violations_upper: float
    """Possible violations."""
    edges_s: tuple[float, float]
    """The edges next to the threshold: equal when it is on one; 0 and infinity where there is none."""

    @property
    def exact(self) -> bool:
        return self.edges_s[0] == self.edges_s[1]


@dataclass(frozen=True, slots=True)
class IntervalVerdict:
    """One interval against an SLO; None where nothing is known."""

    length_s: float
    joint: Joint | None
    in_engine_before: float
    """Infinite if unknown."""
    exact: bool
    """Whether the joint verdict is exact by its making."""
    ttft_apart: bool
    """Whether TTFT was counted at other requests than the rest, so that what was in the engine before matters."""
    objectives: tuple[Verdict | None, ...]
    """In the order of the SLO's."""

    @property
    def bounds(self) -> Bounds | None:
        return self.joint and self.joint.bounds(self.in_engine_before)


def judge(observed: Histogram, threshold_s: float) -> Verdict:
    """The verdict on a histogram of one interval."""
    below_s, above_s = nearest_edges(observed.edges, threshold_s)
    return Verdict(
        observed=observed.count,
        violations=observed.count - observed.at_most(above_s),
        violations_upper=observed.count - observed.at_most(below_s),
        edges_s=(below_s, above_s),
    )


def judge_request(slo: Slo, latencies_s: tuple[float, float, float]) -> tuple[bool, bool]:
    """Whether a request with this TTFT, TPOT and e2e (NaN is unknown) certainly violated, and whether it may have."""
    judged = [pair for pair in zip(latencies_s, slo.request_limits_s, strict=True) if pair[1] < math.inf]
    return any(value > limit for value, limit in judged), any(not value <= limit for value, limit in judged)


def judge_interval(slo: Slo, interval: Interval) -> IntervalVerdict:
    """The verdict on one interval: the joint one from single requests if they are known, else from histograms."""
    objectives = tuple(_judge_metric(interval, objective.metric, objective.threshold_s) for objective in slo.objectives)
    joint, exact, ttft_apart = _judge_together(slo, interval, objectives)
    before = interval.in_engine_before
    return IntervalVerdict(
        length_s=interval.length_s,
        joint=joint,
        in_engine_before=math.inf if before is None else before,
        exact=exact,
        ttft_apart=ttft_apart,
        objectives=objectives,
    )


def nearest_edges(edges: tuple[float, ...], threshold_s: float) -> tuple[float, float]:
    """The edges below and above the threshold, equal when one is the threshold."""
    for edge in edges:
        if math.isclose(edge, threshold_s, rel_tol=1e-9):
            return edge, edge
    below = max((edge for edge in edges if edge < threshold_s), default=0.0)
    above = min((edge for edge in edges if edge > threshold_s), default=math.inf)
    return below, above


def _judge_metric(interval: Interval, metric: SloMetric, threshold_s: float) -> Verdict | None:
    observed: Histogram | None = getattr(interval, metric)
    return None if observed is None else judge(observed, threshold_s)


def _judge_together(slo: Slo, interval: Interval, objectives: tuple[Verdict | None, ...]) -> Together:
    metrics = [objective.metric for objective in slo.objectives]
    ttft = objectives[metrics.index(SloMetric.TTFT)] if SloMetric.TTFT in metrics else None
    if metrics == [SloMetric.TTFT]:
        return UNKNOWN if ttft is None else Together(Joint(*ttft[:3]), exact=ttft.exact)
    if interval.judged is not None:
        one_by_one = Bounds(*interval.judged)
        return Together(Joint(*one_by_one), exact=one_by_one.violations == one_by_one.violations_upper)
    at_finish = [
        _judge_metric(interval, SloMetric.TPOT if o.metric is SloMetric.ITL else o.metric, o.threshold_s)
        for o in slo.objectives
        if o.metric is not SloMetric.TTFT
    ]
    finished = _any_of(at_finish)
    if finished is None:
        return UNKNOWN
    if SloMetric.TTFT not in metrics:
        return Together(
            Joint(*finished), exact=all(v is not None and v.exact for v in at_finish) and len(at_finish) == 1
        )
    if ttft is None:
        return Together(Joint(finished.requests, finished.violations, finished.requests))
    return Together(Joint(0.0, 0.0, 0.0, *finished, *ttft[:3]), ttft_apart=True)


def _any_of(verdicts: list[Verdict | None]) -> Bounds | None:
    """Fréchet's bounds over the same requests; an objective that is unknown may have been missed by all of them."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return None
    requests = max(verdict.observed for verdict in known)
    upper = sum(verdict.violations_upper + requests - verdict.observed for verdict in known)
    return Bounds(
        requests,
        max(verdict.violations for verdict in known),
        min(requests, upper) if len(known) == len(verdicts) else requests,
    )
