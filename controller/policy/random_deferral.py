"""``random_deferral``: the matched control that every claim is measured against.

With a budget of N syncs until a horizon T and a minimum gap g, the start times are the i-th smallest (from 0) of N
uniform draws on [0, T' - (N-1) g], plus i*g: uniform over all schedules that keep the gap. T' leaves a margin at
the end so that the last round completes within the horizon. The k-th sync starts when its time has come.

A budget that is a rate has one sync per period, whose start is uniform within it: (k + u_k) * period.

The draws depend on (seed, draw) only, never on when the budget started: the same draw can be repeated.
Without such a budget, or with one of more than `MAX_DRAWN` syncs, each round draws its own H uniformly from ``min_h``
to ``max_h``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field

from controller.policy.base import FleetView, Group
from controller.policy.rule import Opinion
from controller.schema import Reason

# Share of the horizon kept free at its end; a constant, since a measured one would move times that are already drawn.
TAIL_FRAC = 0.05
MAX_DRAWN = 100_000


class RandomDeferralParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seed: int | None = Field(default=None, ge=0)
    """Seed of the draws; by default the controller's."""
    draw: int = Field(default=0, ge=0)
    """Which of the schedules of this seed."""


@dataclass(frozen=True, slots=True)
class RandomDeferral:
    seed: int
    draw: int

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        budget = view.budget
        if budget.period_s is not None:
            share = random_share(seed=self.seed, draw=self.draw, number=budget.spent)
            in_s = budget.started_s + (budget.spent + share) * budget.period_s - now_s
            return _opinion(in_s <= 0, {"random_time_in_s": in_s})
        if budget.outer_syncs is None or budget.horizon_s is None or budget.outer_syncs > MAX_DRAWN:
            h = random_h(seed=self.seed, draw=self.draw, round=view.round, min_h=view.min_h, max_h=view.max_h)
            return _opinion(group.h >= h, {"random_h": float(h)})
        times_s = random_times_s(
            budget.outer_syncs, seed=self.seed, draw=self.draw, horizon_s=budget.horizon_s, min_gap_s=budget.min_gap_s
        )
        if budget.spent >= len(times_s):
            return _opinion(False, {})
        in_s = budget.started_s + times_s[budget.spent] - now_s
        return _opinion(in_s <= 0, {"random_time_in_s": in_s})


def _opinion(reached: bool, terms: dict[str, float]) -> Opinion:
    reason = Reason.RANDOM_TIME_REACHED if reached else Reason.BEFORE_RANDOM_TIME
    return Opinion(sync=reached, reason=reason, terms=terms)


@lru_cache(maxsize=8)
def random_times_s(num_syncs: int, *, seed: int, draw: int, horizon_s: float, min_gap_s: float) -> tuple[float, ...]:
    """Start times of the syncs in seconds since the budget began."""
    rng = random.Random(f"times/{seed}/{draw}")
    span_s = max(0.0, horizon_s * (1 - TAIL_FRAC) - (num_syncs - 1) * min_gap_s)
    draws_s = sorted(rng.uniform(0.0, span_s) for _ in range(num_syncs))
    return tuple(time_s + index * min_gap_s for index, time_s in enumerate(draws_s))


def random_h(*, seed: int, draw: int, round: int, min_h: int, max_h: int) -> int:  # noqa: A002
    """The H of one round, uniform on [min_h, max_h]."""
    return random.Random(f"h/{seed}/{draw}/{round}").randint(min_h, max_h)


def random_share(*, seed: int, draw: int, number: int) -> float:
    """Where in its period the sync ``number`` of a rate starts, uniform on [0, 1)."""
    return random.Random(f"share/{seed}/{draw}/{number}").random()
