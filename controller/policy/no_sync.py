"""``no_sync``: islands train and never sync, not even at ``max_h``. The baseline that shows what syncs cost.

The exception is a round that an island began by itself before it heard of this policy: the others join it. It happens
anyway, and islands that stayed out would train on from other global parameters for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from controller.policy.base import Decision, FleetView, summarize
from controller.policy.guard import joins_open_round
from controller.policy.rule import common_terms
from controller.schema import Action, Reason


class NoSyncParams(BaseModel):
    """Takes no parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class NoSync:
    name: str = "no_sync"
    syncs: bool = False

    def decide(self, view: FleetView, now_s: float) -> Decision:
        terms = common_terms(view, summarize(view, now_s), now_s)
        if joins_open_round(view, now_s):
            return Decision(action=Action.SYNC, reason=Reason.JOIN_OPEN_ROUND, terms=terms)
        return Decision(action=Action.DEFER, reason=Reason.NO_SYNC_POLICY, terms=terms)
