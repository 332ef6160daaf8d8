"""``no_sync``: islands train and never sync, not even at ``max_h``. The baseline that shows what syncs cost."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from controller.policy.base import Decision, FleetView, summarize
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
        return Decision(action=Action.DEFER, reason=Reason.NO_SYNC_POLICY, terms=terms)
