"""SLO accounts over sliding windows: goodput, attainment, error budget and burn rate, each with its bounds.

    burn rate          violation rate / (1 - target): 1 spends the budget exactly, 14.4 for an hour spends 2 % of that
                       of 30 days
    error budget left  1 - burn rate: what the window's own budget has left; negative when overspent
    fast burn          the burn rates of five minutes and of an hour are both 14.4 or more: the page alert of Google's
                       SRE workbook, chapter 5, where the short window ends the alert soon after the trouble

Unknown is None: a window in which no interval was judged has no counts, one without requests no rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sidecar.schema import ObjectiveWindow, SloObjective, SloReport, SloWindow
from sidecar.slo.judge import Bounds, IntervalVerdict, Joint, Verdict
from sidecar.slo.objectives import Objective, Slo, SloMetric
from sidecar.slo.windows import SlidingSums

WINDOWS_S = (60.0, 300.0, 3600.0)
FAST_BURN_RATE = 14.4
FAST_BURN_WINDOWS_S = (300.0, 3600.0)
JOINT_WIDTH = 1 + len(Joint._fields)
"""Seconds that were judged, and the sums."""
OBJECTIVE_WIDTH = 4
"""Seconds that were judged, observations, violations, their upper bound."""
SAME_MOMENT_S = 1e-6


class SloAccounts:
    """Verdicts of the last hour. Time is monotonic and passed in."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        width = JOINT_WIDTH + OBJECTIVE_WIDTH * len(slo.objectives)
        self._windows = [SlidingSums(window_s, width) for window_s in WINDOWS_S]
        self._edges_s: list[tuple[float, float] | None] = [None] * len(slo.objectives)
        self._exact = False
        self._chain_end_s = -math.inf

    def add(self, verdict: IntervalVerdict, *, now_s: float) -> None:
        """Take in the interval that ended at ``now_s``."""
        joint = verdict.joint or Joint()
        values = [verdict.length_s if verdict.joint is not None else 0.0, *joint]
        for i, single in enumerate(verdict.objectives):
            values += _objective_values(single, verdict.length_s)
            self._edges_s[i] = single.edges_s if single is not None else self._edges_s[i]
        if verdict.joint is not None:
            self._exact = verdict.exact
        follows = abs(now_s - verdict.length_s - self._chain_end_s) <= SAME_MOMENT_S
        for window in self._windows:
            window.add(
                values,
                now_s=now_s,
                entered=verdict.in_engine_before if verdict.ttft_apart else 0.0,
                begins_chain=verdict.ttft_apart and not follows,
            )
        if verdict.ttft_apart:
            self._chain_end_s = now_s

    def report(self, *, now_s: float) -> SloReport:
        windows = tuple(self._window(window, now_s=now_s) for window in self._windows)
        return SloReport(
            slo=str(self._slo),
            target_frac=self._slo.target_frac,
            exact=self._exact,
            objectives=tuple(map(_objective, self._slo.objectives, self._edges_s)),
            windows=windows,
            fast_burn=_fast_burn(windows),
        )

    def _window(self, window: SlidingSums, *, now_s: float) -> SloWindow:
        sums = window.read(now_s=now_s)
        values = sums.values if sums is not None else (0.0,) * (JOINT_WIDTH + OBJECTIVE_WIDTH * len(self._edges_s))
        singles = tuple(
            _objective_window(objective, values[at : at + OBJECTIVE_WIDTH])
            for objective, at in zip(
                self._slo.objectives, range(JOINT_WIDTH, len(values), OBJECTIVE_WIDTH), strict=True
            )
        )
        covered_s = values[0]
        if sums is None or covered_s <= 0:
            return SloWindow(window_s=window.window_s, covered_s=0.0, objectives=singles)
        bounds = Joint(*values[1:JOINT_WIDTH]).bounds(sums.entered)
        return judged_window(
            bounds, window_s=window.window_s, covered_s=covered_s, budget_frac=self._slo.budget_frac, singles=singles
        )


def judged_window(
    bounds: Bounds, *, window_s: float, covered_s: float, budget_frac: float, singles: tuple[ObjectiveWindow, ...]
) -> SloWindow:
    """What the bounds mean."""
    requests, violations, upper = bounds
    rate = violations / requests if requests > 0 else None
    rate_upper = upper / requests if requests > 0 else None
    return SloWindow(
        window_s=window_s,
        covered_s=covered_s,
        requests=round(requests),
        violations=round(violations),
        violations_upper=round(upper),
        attainment_frac=_but(rate),
        attainment_frac_lower=_but(rate_upper),
        goodput_per_s=(requests - violations) / covered_s,
        goodput_per_s_lower=(requests - upper) / covered_s,
        burn_rate=_per(rate, budget_frac),
        burn_rate_upper=_per(rate_upper, budget_frac),
        error_budget_left_frac=_but(_per(rate, budget_frac)),
        error_budget_left_frac_lower=_but(_per(rate_upper, budget_frac)),
        objectives=singles,
    )


def _objective_values(single: Verdict | None, length_s: float) -> list[float]:
    if single is None:
        return [0.0] * OBJECTIVE_WIDTH
    return [length_s, single.observed, single.violations, single.violations_upper]


def _objective(objective: Objective, edges_s: tuple[float, float] | None) -> SloObjective:
    return SloObjective(
        metric=objective.metric,
        threshold_s=objective.threshold_s,
        counts="tokens" if objective.metric is SloMetric.ITL else "requests",
        edges_s=edges_s and (edges_s[0], edges_s[1] if math.isfinite(edges_s[1]) else None),
        exact=edges_s is not None and edges_s[0] == edges_s[1],
    )


def _objective_window(objective: Objective, values: Sequence[float]) -> ObjectiveWindow:
    covered_s, observed, violations, upper = values
    if covered_s <= 0:
        return ObjectiveWindow(metric=objective.metric)
    return ObjectiveWindow(
        metric=objective.metric,
        observed=round(observed),
        violations=round(violations),
        violations_upper=round(upper),
        attainment_frac=1.0 - violations / observed if observed > 0 else None,
        attainment_frac_lower=1.0 - upper / observed if observed > 0 else None,
    )


def _fast_burn(windows: tuple[SloWindow, ...]) -> bool | None:
    rates = [window.burn_rate for window in windows if window.window_s in FAST_BURN_WINDOWS_S]
    known = [rate for rate in rates if rate is not None]
    return min(known) >= FAST_BURN_RATE if len(known) == len(rates) else None


def _but(part: float | None) -> float | None:
    return None if part is None else 1.0 - part


def _per(rate: float | None, budget_frac: float) -> float | None:
    return None if rate is None else rate / budget_frac
