"""``fixed_h``: sync whenever H reaches ``h``, whatever the load. DiLoCo as it is usually run (arXiv 2311.08105)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from controller.policy.base import FleetView, Group
from controller.policy.rule import Opinion
from controller.schema import Reason

DEFAULT_H = 256


class FixedHParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    h: int | None = Field(default=None, ge=1)
    """Inner steps between syncs; by default 256, or the nearest of ``min_h`` and ``max_h``."""


@dataclass(frozen=True, slots=True)
class FixedH:
    h: int

    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion:
        reached = group.h >= self.h
        reason = Reason.FIXED_H_REACHED if reached else Reason.BELOW_FIXED_H
        return Opinion(sync=reached, reason=reason, terms={"fixed_h": float(self.h)})
