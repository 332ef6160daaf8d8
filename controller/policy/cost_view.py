"""What a policy may know about the cost of a sync: expected extra SLO violations, added over the bound servers.

Costs are per second of sync. ``expected_per_s`` ranks moments. It may be slightly below 0, since the calmer of two calm
ones still ranks lower (shown to people it is clipped, `violations`), and lies under the mean where costs scatter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

SAME = 1e-6
"""Relative difference up to which two costs are the same: what separates them is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """The cost of a sync that starts now, beside those of the recent past."""

    expected_per_s: float
    """Of a sync that starts now."""
    recent_per_s: Sequence[float]
    """`expected_per_s` as it was at each of the last seconds, ascending; never changed once it is here."""
    decorrelation_s: float
    """Moments that are so far apart count as independent chances."""
    ahead_per_s: tuple[tuple[float, float], ...] = ()
    """What the servers' own forecasts say: seconds from now until the start, and cost; empty while one is unknown."""

    def standing(self) -> tuple[float, float]:
        """Share of the recent moments that cost less than now, and share that cost the same."""
        num = len(self.recent_per_s)
        if num == 0:
            return 0.0, 1.0
        margin = SAME * (abs(self.expected_per_s) + SAME)
        below = bisect_left(self.recent_per_s, self.expected_per_s - margin)
        up_to = bisect_right(self.recent_per_s, self.expected_per_s + margin)
        return below / num, (up_to - below) / num

    def quantile_per_s(self, share: float) -> float:
        """The cost that ``share`` of the recent moments did not exceed."""
        num = len(self.recent_per_s)
        return self.recent_per_s[min(num - 1, max(0, int(share * num)))] if num else self.expected_per_s

    def foreseen_per_s(self, until_s: float) -> float | None:
        """Mean of the servers' own forecasts for the next ``until_s`` seconds (trapezoids); None while unknown."""
        return mean_ahead(self.ahead_per_s, until_s)

    def least_ahead_per_s(self, from_s: float, until_s: float) -> float | None:
        """Least cost that the servers' own forecasts see between two start times; None where they see none."""
        return min((cost for start_s, cost in self.ahead_per_s if from_s <= start_s <= until_s), default=None)


def mean_ahead(ahead: Sequence[tuple[float, float]], until_s: float) -> float | None:
    """Mean over ``[0, until_s]`` of a line through points in order; level before the first and after the last."""
    if not ahead:
        return None
    area, (last_s, last) = 0.0, (0.0, ahead[0][1])
    for start_s, cost in ahead:
        if start_s >= until_s:
            break
        area += (start_s - last_s) * (last + cost) / 2
        last_s, last = start_s, cost
    else:
        return (area + (until_s - last_s) * last) / until_s if until_s > 0 else last
    end = last + (cost - last) * (until_s - last_s) / (start_s - last_s) if start_s > last_s else cost
    return (area + (until_s - last_s) * (last + end) / 2) / until_s if until_s > 0 else last


def violations(cost_per_s: float, sync_s: float) -> float:
    """Expected violations of a sync of ``sync_s`` seconds, for people: never below 0."""
    return max(cost_per_s, 0.0) * sync_s
