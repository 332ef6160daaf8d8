"""``wa_forecast``: sync when that costs no more than what may still be expected of the chances before the deadline.

    chances   n = (deadline - now) / (decorrelation time + length of a sync)
    sync iff  cost(now) <= the 1/(n + 1) quantile of the recent costs

The least of n independent costs lies at their 1/(n + 1) quantile on average (the first order statistic of n uniform
ranks has the mean 1/(n + 1)): a moment that is at least as good is taken, a worse one passed while n more are to come.
As the deadline nears, n falls to 0 and any cost will do, so that nothing is left for the deadline to force. The cost is
learned (`controller.cost_track`), and compared with its own values of the last 20 minutes: only its order counts.

The deadline of the next sync is the earliest of

    an equal share of the time that the budget has left   (last possible start - now) / remaining, or its period's end
    the budget's longest deferral
    the time at which H reaches max_h, at the present step time

The share puts the budget's price under integral control: every sync that was not made so far shortens it, which raises
the quantile, and with it the cost at which one more sync is bought (``price``, in violations); every one that came
early lengthens it. The count arrives at the budget, since the guard forces what is left when it is due.

Equal costs (nights without a request, a flat load): a share f of the recent moments costs what this one does, and the
quantile lies within them. Waiting loses nothing while enough such moments are to come, and syncs should not all come in
the first ones: of the f·(n - m) + 1 that can be spared one is drawn, where m = ln 0.01 / ln(1 - f) chances are kept so
that one of them is as good again with 99 %. On constant costs that is a uniform draw, like random deferral.

Season: where the servers foresee, at least one decorrelation time from now and before the deadline, under half of what
they foresee for now, the sync waits for that.

On traffic that nothing predicts the ranks are noise: then this is random deferral with other draws, and costs as much.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from controller.policy.base import FleetView, Group
from controller.policy.cost_view import CostView, violations
from controller.policy.guard import budget_due_s, defer_until_s
from controller.policy.rule import Opinion
from controller.schema import Reason

MIN_RECENT = 10
"""Seconds of costs below which nothing can be called low."""
DEFAULT_DEADLINE_S = 60.0
"""Where neither the budget nor the step time sets a deadline: islands that have just started."""
DRAW_EVERY_S = 5.0
"""Among equal moments one draw stands for so many seconds: one per tick would be a new chance every tick."""
MISS = 0.01
"""Probability of not meeting an equal moment again that is taken for the sake of spreading the syncs."""


class WaForecastParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    decorrelation_s: float | None = Field(default=None, ge=0.5, le=600)
    """Time between two chances; by default learned, 5 to 12 s."""
    ahead_frac: float = Field(default=0.5, ge=0, le=1)
    """Wait for a foreseen cost that is under this share of the one foreseen for now; 0 never waits for one."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the draws among equal costs; by default the controller's."""


@dataclass(frozen=True, slots=True)
class WaForecast:
    params: WaForecastParams
    seed: int

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        due_in_s = due_in(view, group, now_s)
        costs = view.costs
        if costs is None:
            return Opinion(sync=False, reason=Reason.COST_UNKNOWN, terms={"due_in_s": due_in_s})
        if len(costs.recent_per_s) < MIN_RECENT:
            return Opinion(sync=False, reason=Reason.COST_HISTORY_SHORT, terms={"due_in_s": due_in_s})
        decorrelation_s = self.params.decorrelation_s or costs.decorrelation_s
        chances = due_in_s / (decorrelation_s + view.expected_sync_s)
        quantile = 1.0 / (chances + 1.0)
        below, same = costs.standing()
        least_ahead = costs.least_ahead_per_s(decorrelation_s, due_in_s)
        terms = {
            "due_in_s": due_in_s,
            "decorrelation_s": decorrelation_s,
            "chances_left": chances,
            "quantile": quantile,
            "cheaper_frac": below,
            "same_frac": same,
            "sync_cost": violations(costs.expected_per_s, view.expected_sync_s),
            "price": violations(costs.quantile_per_s(quantile), view.expected_sync_s),
        }
        if least_ahead is not None:
            terms["sync_cost_ahead"] = violations(least_ahead, view.expected_sync_s)
        reason = self._judge(view, costs, terms, least_ahead, now_s)
        return Opinion(sync=reason in {Reason.COST_LOW, Reason.COST_SAME_CHOSEN}, reason=reason, terms=terms)

    def _judge(
        self, view: FleetView, costs: CostView, terms: dict[str, float], least_ahead: float | None, now_s: float
    ) -> Reason:
        if terms["cheaper_frac"] > terms["quantile"]:
            return Reason.COST_HIGH
        now = costs.foreseen_per_s(view.expected_sync_s)
        if least_ahead is not None and now is not None and least_ahead < self.params.ahead_frac * now:
            return Reason.LOWER_COST_AHEAD
        if terms["cheaper_frac"] + terms["same_frac"] <= terms["quantile"]:
            return Reason.COST_LOW
        drawn = _draw(self.seed, view.round, now_s) < tie_share(
            terms["same_frac"], chances=terms["due_in_s"] / DRAW_EVERY_S
        )
        return Reason.COST_SAME_CHOSEN if drawn else Reason.COST_SAME_PASSED


def due_in(view: FleetView, group: Group, now_s: float) -> float:
    """Seconds within which the next sync should come (see the module's text)."""
    budget = view.budget
    found = []
    due_s = budget_due_s(view, group)
    if due_s is not None:
        found.append((due_s - now_s) / (budget.remaining or 1))
    deferred_until_s = defer_until_s(view)
    if deferred_until_s is not None:
        found.append(deferred_until_s - now_s)
    if group.step_time_s > 0:
        found.append((view.max_h - group.h_max) * group.step_time_s)
    return max(0.0, min(found, default=DEFAULT_DEADLINE_S))


def tie_share(same_frac: float, *, chances: float) -> float:
    """Probability with which one of the equal moments is taken, of ``chances`` draws that are left."""
    kept = 0.0 if same_frac >= 1.0 else math.log(MISS) / math.log1p(-same_frac)
    return 1.0 / (same_frac * max(chances - kept, 0.0) + 1.0)


def _draw(seed: int, round_: int, now_s: float) -> float:
    return random.Random(f"same/{seed}/{round_}/{int(now_s // DRAW_EVERY_S)}").random()
