"""One policy on a virtual clock: islands that train and sync together, beside servers whose traffic is known.

Islands take a step every ``step_s``, stand still during a sync, and report at every whole second, at which the policy
decides: the controller's own policy code on the view that a controller would have. A sync begins ``lag_s`` after its
decision and lasts ``sync_s``. Same inputs, same run: only policies that draw depend on a seed, by their own parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.budget import new_period, view_budget
from controller.policy.base import FleetView, IslandView, Policy
from controller.schema import Action, BudgetSpec
from replay.virtual_sidecar import ORIGIN_S, Moment

START_LOSS = 2.0
LOSS_DROP_PER_STEP = 1e-4
"""So much falls a training loss in its later part: wa_diloco's value of syncing grows over some 500 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFleet:
    """What is the same for every policy."""

    min_h: int
    max_h: int
    step_s: float
    tokens_per_step: int
    sync_s: float
    lag_s: float
    budget: BudgetSpec


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a policy synced, from the beginning of the slice."""

    windows: tuple[tuple[float, float], ...]

    @property
    def busy_s(self) -> float:
        return sum(end_s - start_s for start_s, end_s in self.windows)


def run_policy(policy: Policy, fleet: VirtualFleet, moments: Sequence[Moment]) -> Schedule:
    """Decide at the end of every second, until the moments are over."""
    windows: list[tuple[float, float]] = []
    for second, moment in enumerate(moments):
        view = _view(fleet, moment, windows, second)
        decision = policy.decide(view, ORIGIN_S + second)
        if decision.action is Action.SYNC:
            start_s = second + fleet.lag_s
            windows.append((start_s, start_s + fleet.sync_s))
    return Schedule(tuple(windows))


def steps_between(fleet: VirtualFleet, start_s: float, end_s: float) -> int:
    return max(0, int((end_s - start_s) / fleet.step_s))


def _view(fleet: VirtualFleet, moment: Moment, windows: Sequence[tuple[float, float]], second: int) -> FleetView:
    busy = bool(windows) and second < windows[-1][1]
    since_s = windows[-1][1] if windows else 0.0
    h = 0 if busy else steps_between(fleet, since_s, second)
    # The steps before the last sync: of the time until then all but the syncs.
    earlier = steps_between(fleet, 0.0, since_s - fleet.sync_s * len(windows))
    islands = tuple(
        IslandView(
            slot=index,
            node=server.node,
            server_id=server.server_id,
            ready=True,
            inner_steps_since_sync=h,
            tokens_since_sync=h * fleet.tokens_per_step,
            tokens=(earlier + h) * fleet.tokens_per_step,
            loss=START_LOSS - h * LOSS_DROP_PER_STEP,
            loss_at_sync=START_LOSS,
            step_time_s=fleet.step_s,
            syncing=busy,
        )
        for index, server in enumerate(moment.servers)
    )
    return FleetView(
        islands=islands,
        servers=moment.servers,
        budget=replace(
            view_budget(new_period(fleet.budget, now_s=ORIGIN_S)),
            spent=len(windows) - busy,
            last_sync_s=ORIGIN_S + windows[-1][0] if windows else None,
        ),
        min_h=fleet.min_h,
        max_h=fleet.max_h,
        run_started_s=ORIGIN_S,
        round=len(windows),
        sync_in_flight=busy,
        expected_sync_s=fleet.sync_s,
        last_transfer_s=fleet.sync_s / 2 if windows else None,
        reaction_s=1.0 + fleet.lag_s,
        costs=moment.costs,
    )
