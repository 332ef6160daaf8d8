"""Keeps the headroom of the running fleet up to date: gathered on the event loop, computed in a thread.

The costs are read in the thread too: of a thousand servers they are two million numbers. Samples may come meanwhile, so
that of the newest second some servers may be missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from controller.costs import HISTORY_S
from controller.headroom import Conduct, CostSource, Window, assess
from controller.lab_schema import Headroom
from controller.policy.base import bound_names
from controller.records import RoundEntry
from controller.schema import BudgetSpec, PolicySpec
from controller.shadow_book import ShadowBook
from controller.state import FleetState
from controller.view import build_view

WINDOW_S = HISTORY_S
"""All that is known of the costs."""
EVERY_S = 30.0
"""A window of `WINDOW_S` takes some 20 ms of a thread for each policy."""


class HeadroomMonitor:
    """The newest report, and reports of other windows on demand."""

    def __init__(self, state: FleetState, shadows: ShadowBook, costs: CostSource, *, now_s: float) -> None:
        self._state = state
        self._shadows = shadows
        self._costs = costs
        self._in_force: tuple[PolicySpec, float] = (state.policy_spec, now_s)
        self._turn = asyncio.Lock()
        self.latest: Headroom | None = None

    def follow(self, now_s: float) -> None:
        """Note since when the policy in force is."""
        if self._state.policy_spec != self._in_force[0]:
            self._in_force = (self._state.policy_spec, now_s)

    async def refresh(self, now_s: float) -> None:
        self.latest = await self.report(now_s, window_s=WINDOW_S)

    async def report(self, now_s: float, *, window_s: int) -> Headroom:
        """One at a time: whoever asks more often only waits longer."""
        async with self._turn:
            servers = sorted(bound_names(build_view(self._state, now_s, with_costs=False)))
            until_s = math.floor(now_s)
            window = self._gather()
            return await asyncio.to_thread(self._assess, servers, window, until_s - window_s, until_s)

    def _assess(self, servers: Sequence[str], window: Window, since_s: int, until_s: int) -> Headroom:
        costs = self._costs.series(servers, since_s=since_s, until_s=until_s)
        return assess(replace(window, since_s=until_s - len(costs), costs_per_s=costs))

    def _gather(self) -> Window:
        """All but the costs."""
        state = self._state
        budget = state.budget.spec
        return Window(
            since_s=0.0,
            costs_per_s=(),
            syncs_per_s=_rate(budget),
            min_gap_s=budget.min_gap_s,
            sync_s=state.rounds.expected_sync_s(),
            conducts=(self._conduct(), *self._shadow_conducts()),
        )

    def _conduct(self) -> Conduct:
        spec, since_s = self._in_force
        mine = [entry for entry in self._state.rounds.entries if entry.spent and entry.policy == spec.name]
        return Conduct(
            policy=spec.label, shadow=False, since_s=since_s, starts_s=tuple(_started_s(entry) for entry in mine)
        )

    def _shadow_conducts(self) -> list[Conduct]:
        return [
            Conduct(policy=shadow.spec.label, shadow=True, since_s=shadow.since_s, starts_s=tuple(shadow.starts_s))
            for shadow in self._shadows.shadows
        ]


def _rate(budget: BudgetSpec) -> float | None:
    if budget.period_s is not None:
        return 1.0 / budget.period_s
    if budget.outer_syncs is None or budget.horizon_s is None:
        return None
    return budget.outer_syncs / budget.horizon_s


def _started_s(entry: RoundEntry) -> float:
    """When the first island left its inner loop for it; a directive may wait for a lull."""
    return min((one.report.started_s for one in entry.reports), default=entry.began_s)
