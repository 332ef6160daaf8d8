"""``adaptive_tokens``: sync when the tokens since the last sync reach a target that follows the budget.

    target = clip(R · S, min_h · τ, max_h · τ)

R is the mean token rate of all islands since the run began, τ the tokens that all of them together take per inner step
since the last sync, and S the seconds that each remaining sync has: those from the last sync until the horizon ends,
over the number left and one (the time after the last); a rate has its period. Islands that yield to traffic take tokens
more slowly than R, and sync later; in a quiet hour they sync earlier. Without a number in a horizon or a rate nothing
says how often, and the target is √(min_h · max_h) · τ, the middle of what is allowed. Blind to what a sync costs: a
baseline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from controller.policy.base import FleetView, Group
from controller.policy.rule import Opinion
from controller.schema import Reason


class AdaptiveTokensParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scale: float = Field(default=1.0, gt=0)
    """Factor on the target, before it is clipped."""


@dataclass(frozen=True, slots=True)
class AdaptiveTokens:
    scale: float

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        target = self.scale * target_tokens(view, now_s)
        per_step = tokens_per_step(view)
        target = min(max(target, view.min_h * per_step), view.max_h * per_step)
        # An island that has not taken a step yet says nothing about tokens.
        reached = group.tokens >= target > 0
        reason = Reason.TOKENS_REACHED if reached else Reason.TOKENS_BELOW_TARGET
        return Opinion(sync=reached, reason=reason, terms={"target_tokens": target, "tokens_per_step": per_step})


def tokens_per_step(view: FleetView) -> float:
    """Tokens that one inner step of every ready island takes together; 0 before the first."""
    return sum(
        island.tokens_since_sync / island.inner_steps_since_sync
        for island in view.islands
        if island.ready and island.inner_steps_since_sync > 0
    )


def target_tokens(view: FleetView, now_s: float) -> float:
    """R · S of the module's text, or the middle where nothing says how often."""
    interval_s = _interval_s(view)
    elapsed_s = now_s - view.run_started_s
    if interval_s is None or elapsed_s <= 0:
        return math.sqrt(view.min_h * view.max_h) * tokens_per_step(view)
    return sum(island.tokens for island in view.islands if island.ready) / elapsed_s * interval_s


def _interval_s(view: FleetView) -> float | None:
    """Seconds from the last sync to the next one, as the budget has it."""
    budget = view.budget
    if budget.period_s is not None:
        return budget.period_s
    if not budget.remaining or budget.horizon_s is None:
        return None
    begin_s = budget.started_s if budget.last_sync_s is None else max(budget.last_sync_s, budget.started_s)
    return max(0.0, budget.started_s + budget.horizon_s - begin_s) / (budget.remaining + 1)
