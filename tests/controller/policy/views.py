"""Views of a fleet with good defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controller.policy import PolicyContext
from controller.policy.base import BudgetView, FleetView, IslandView, ServerView
from controller.policy.cost_view import CostView

CONTEXT = PolicyContext(min_h=10, max_h=100, seed=7)


def island(h: int = 50, **fields: Any) -> IslandView:
    base: dict[str, Any] = {
        "slot": 0,
        "node": "n",
        "server_id": "s",
        "ready": True,
        "inner_steps_since_sync": h,
        "tokens_since_sync": h * 1000,
        "tokens": h * 1000,
        "step_time_s": 1.0,
    }
    return IslandView(**{**base, **fields})


def costs(now: float, recent: Sequence[float], **fields: Any) -> CostView:
    return CostView(expected_per_s=now, recent_per_s=sorted(recent), **{"decorrelation_s": 3.0, **fields})


def fleet(*islands: IslandView, **fields: Any) -> FleetView:
    base: dict[str, Any] = {
        "islands": islands or (island(),),
        "servers": (ServerView(server_id="s", node="n", pressure_frac=0.2),),
        "budget": BudgetView(),
        "min_h": 10,
        "max_h": 100,
        "run_started_s": 0.0,
    }
    return FleetView(**{**base, **fields})
