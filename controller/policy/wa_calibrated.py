"""``wa_calibrated``: the score of ``wa_diloco`` less what a sync now would cost, as the sidecars have learned it.

    score = score of wa_diloco - w_sync · sat(sync cost / scale)

The sync cost are the expected extra SLO violations of a sync that starts now, by the sidecars' own forecasts of load
and arrivals and their calibrated P(violation | load, sync). A cost that is unknown counts as a full one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from controller.policy.base import FleetView, Group, saturate
from controller.policy.cost_view import violations
from controller.policy.rule import Opinion
from controller.policy.wa_diloco import WaDilocoParams, score_opinion, score_terms


class WaCalibratedParams(WaDilocoParams):
    """Those of ``wa_diloco``, and two more."""

    w_sync: float = Field(default=1.0, ge=0)
    sync_cost_scale: float = Field(default=5.0, gt=0)
    """Violations that count as a full cost."""


@dataclass(frozen=True, slots=True)
class WaCalibrated:
    params: WaCalibratedParams

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        terms = score_terms(self.params, view, group)
        sync_cost = foreseen_violations(view)
        share = 1.0 if sync_cost is None else saturate(sync_cost / self.params.sync_cost_scale)
        terms["cost_sync"] = self.params.w_sync * share
        terms["score"] -= terms["cost_sync"]
        if sync_cost is not None:
            terms["sync_cost"] = sync_cost
        return score_opinion(terms, self.params.threshold)


def foreseen_violations(view: FleetView) -> float | None:
    """Of a sync that starts now, as the servers foresee it; None while one of them does not know."""
    if view.costs is None:
        return None
    per_s = view.costs.foreseen_per_s(view.expected_sync_s)
    return None if per_s is None else violations(per_s, view.expected_sync_s)
