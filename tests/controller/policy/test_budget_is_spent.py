"""A budget is spent exactly, within its horizon, whatever the load: the pure policies on a virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from controller.policy import PolicyContext, make_policy
from controller.policy.base import BudgetView, FleetView, IslandView, Policy, ServerView
from controller.policy.cost_view import CostView
from controller.schema import Action, PolicySpec

TICK_S = 0.5
HEARTBEAT_S = 1.0
HORIZON_S = 240.0
MIN_H, MAX_H = 20, 400

Load = Callable[[float], float]
LOADS: dict[str, Load] = {
    "idle": lambda t_s: 0.05,
    "full": lambda t_s: 1.0,
    "waves": lambda t_s: 0.5 + 0.5 * math.sin(t_s / 10),
    "bursts": lambda t_s: 1.0 if t_s % 30 < 10 else 0.1,
    "late_burst": lambda t_s: 1.0 if t_s > 120 else 0.2,
}


@dataclass
class Run:
    """One island on a virtual clock; a step takes longer under load, a round takes ``sync_s``."""

    policy: Policy
    load: Load
    budget: tuple[int, float]
    """Number and gap."""
    rng: random.Random
    sync_s: float = 2.0
    per_hour: float | None = None
    """In place of the number."""
    horizon_s: float = HORIZON_S
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    h_at_sync: list[int] = field(default_factory=list)

    def play(self) -> Run:
        steps, reported, end_s = 0.0, 0, 0.0
        for tick in range(int((self.horizon_s + 60) / TICK_S)):
            now_s = tick * TICK_S
            in_flight = now_s < end_s
            steps = 0.0 if in_flight else steps + TICK_S / self.step_time_s(now_s)
            if now_s % HEARTBEAT_S == 0 or in_flight:
                reported = int(steps)
            decision = self.policy.decide(self.view(now_s, reported, in_flight=in_flight), now_s)
            if decision.action is Action.SYNC:
                self.starts_s.append(now_s)
                self.h_at_sync.append(reported)
                end_s = now_s + self.sync_s * self.rng.uniform(0.7, 1.2)
                self.ends_s.append(end_s)
        return self

    def step_time_s(self, now_s: float) -> float:
        return 0.1 * (1 + self.load(now_s)) * self.rng.uniform(0.8, 1.2)

    def view(self, now_s: float, h: int, *, in_flight: bool) -> FleetView:
        island = IslandView(
            slot=0,
            node="n",
            server_id="s",
            ready=True,
            inner_steps_since_sync=h,
            tokens_since_sync=h * 2000,
            tokens=int(now_s * 10_000),
            loss=2.0,
            loss_at_sync=2.0 + h * 1e-4,
            step_time_s=0.15,
        )
        num_syncs, gap_s = self.budget
        return FleetView(
            islands=(island,),
            servers=(ServerView(server_id="s", node="n", pressure_frac=self.load(now_s)),),
            budget=BudgetView(
                outer_syncs=None if self.per_hour else num_syncs,
                horizon_s=None if self.per_hour else self.horizon_s,
                syncs_per_hour=self.per_hour,
                min_gap_s=gap_s,
                spent=len(self.starts_s) - in_flight,
                last_sync_s=self.starts_s[-1] if self.starts_s else None,
            ),
            min_h=MIN_H,
            max_h=MAX_H,
            run_started_s=0.0,
            sync_in_flight=in_flight,
            expected_sync_s=self.sync_s,
            last_transfer_s=self.sync_s / 2,
            reaction_s=TICK_S + HEARTBEAT_S,
            costs=self.costs(now_s),
        )

    def costs(self, now_s: float) -> CostView:
        past = [10 * self.load(second) for second in range(int(now_s) - 60, int(now_s) + 1)]
        ahead = tuple((start_s, 10 * self.load(now_s + start_s)) for start_s in (0.0, 2.0, 5.0, 10.0, 30.0, 60.0))
        return CostView(expected_per_s=past[-1], recent_per_s=sorted(past), decorrelation_s=5.0, ahead_per_s=ahead)


POLICIES: dict[str, dict[str, float | int]] = {
    "wa_diloco": {},
    "random_deferral": {},
    "pressure_gate": {"threshold": 0.3},
    "adaptive_tokens": {},
    "wa_calibrated": {},
    "wa_forecast": {},
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("budget", [(1, 0.0), (4, 10.0), (8, 20.0), (20, 5.0)])
@pytest.mark.parametrize("seed", range(2))
def test_the_budget_is_spent_exactly_and_in_time(name: str, load: str, budget: tuple[int, float], seed: int) -> None:
    policy = make_policy(
        PolicySpec(name=name, params=POLICIES[name]), PolicyContext(min_h=MIN_H, max_h=MAX_H, seed=seed)
    )
    run = Run(policy, LOADS[load], budget, random.Random(seed)).play()
    num_syncs, gap_s = budget
    assert len(run.starts_s) == num_syncs
    assert max(run.ends_s) <= HORIZON_S
    assert min(run.h_at_sync) >= MIN_H
    gaps_s = [later - earlier for earlier, later in zip(run.starts_s, run.starts_s[1:], strict=False)]
    assert all(between_s >= gap_s for between_s in gaps_s)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("per_hour", [40.0, 120.0])
def test_a_rate_is_kept_within_one_sync(name: str, load: str, per_hour: float) -> None:
    policy = make_policy(PolicySpec(name=name, params=POLICIES[name]), PolicyContext(min_h=MIN_H, max_h=MAX_H, seed=0))
    run = Run(policy, LOADS[load], (0, 0.0), random.Random(0), per_hour=per_hour, horizon_s=1200.0).play()
    for second in range(0, 1200, 10):
        spent = sum(start_s <= second for start_s in run.starts_s)
        # A tick and a report may be late when a sync is due.
        assert -1.05 <= spent - second * per_hour / 3600 <= 1.05, second


def test_wa_diloco_syncs_between_bursts_where_random_does_not_look() -> None:
    def share_in_burst(name: str, draw: dict[str, float | int]) -> float:
        context = PolicyContext(min_h=MIN_H, max_h=MAX_H, seed=0)
        run = Run(
            make_policy(PolicySpec(name=name, params=draw), context), LOADS["bursts"], (6, 20.0), random.Random(0)
        )
        starts_s = run.play().starts_s
        return sum(time_s % 30 < 10 for time_s in starts_s) / len(starts_s)

    drawn = [share_in_burst("random_deferral", {"draw": draw}) for draw in range(20)]
    assert sum(drawn) / len(drawn) > 0.2
    assert share_in_burst("wa_diloco", {"w_inference": 1.0, "tokens_scale": 100_000}) == 0.0
