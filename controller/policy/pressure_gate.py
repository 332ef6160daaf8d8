"""``pressure_gate``: sync as soon as ``min_h`` is reached and the highest pressure is under a threshold."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from controller.policy.base import FleetView, Group
from controller.policy.rule import Opinion
from controller.schema import Reason


class PressureGateParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    threshold: float = Field(default=0.5, gt=0, le=1)
    """Pressure from which syncs wait."""


@dataclass(frozen=True, slots=True)
class PressureGate:
    threshold: float

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        low = group.pressure < self.threshold
        reason = Reason.PRESSURE_LOW if low else Reason.PRESSURE_HIGH
        return Opinion(sync=low, reason=reason, terms={"threshold": self.threshold})
