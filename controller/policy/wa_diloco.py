"""``wa_diloco``: the workload-aware score of the paper.

    score =  w_loss * sat(loss drop / 0.05) + w_tokens * sat(tokens / 10^6)
           - [w_network * network + w_inference * pressure + w_checkpoint * checkpoint
              + w_staleness * sat(staleness / 1800 s)]

Sync when score > threshold. ``sat`` clips to [0, 1]. ``network`` is sat(upload time of the last sync / 10 s), 0 before
the first sync. ``checkpoint`` is 0: islands report no checkpoint activity. A loss drop that is unknown adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from controller.policy.base import FleetView, Group, saturate
from controller.policy.rule import Opinion
from controller.schema import Reason


class WaDilocoParams(BaseModel):
    """Weights of the paper; the scales are what one full term stands for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    w_loss: float = Field(default=0.5, ge=0)
    w_tokens: float = Field(default=0.5, ge=0)
    w_network: float = Field(default=0.5, ge=0)
    w_inference: float = Field(default=0.75, ge=0)
    w_checkpoint: float = Field(default=0.25, ge=0)
    w_staleness: float = Field(default=0.25, ge=0)
    loss_scale: float = Field(default=0.05, gt=0)
    tokens_scale: float = Field(default=1e6, gt=0)
    staleness_scale_s: float = Field(default=1800.0, gt=0)
    network_scale_s: float = Field(default=10.0, gt=0)
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class WaDiloco:
    params: WaDilocoParams

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        return score_opinion(score_terms(self.params, view, group), self.params.threshold)


def score_opinion(terms: dict[str, float], threshold: float) -> Opinion:
    """Sync when the ``score`` among the terms is above the threshold."""
    above = terms["score"] > threshold
    reason = Reason.SCORE_ABOVE_THRESHOLD if above else Reason.SCORE_BELOW_THRESHOLD
    return Opinion(sync=above, reason=reason, terms=terms)


def score_terms(params: WaDilocoParams, view: FleetView, group: Group) -> dict[str, float]:
    """Each weighted term, their balance ``score``, and the threshold."""
    value = {
        "value_loss": params.w_loss * saturate((group.loss_drop or 0.0) / params.loss_scale),
        "value_tokens": params.w_tokens * saturate(group.tokens / params.tokens_scale),
    }
    cost = {
        "cost_network": params.w_network * saturate((view.last_transfer_s or 0.0) / params.network_scale_s),
        "cost_inference": params.w_inference * group.pressure,
        "cost_checkpoint": params.w_checkpoint * 0.0,
        "cost_staleness": params.w_staleness * saturate(group.staleness_s / params.staleness_scale_s),
    }
    score = sum(value.values()) - sum(cost.values())
    return value | cost | {"score": score, "threshold": params.threshold}
