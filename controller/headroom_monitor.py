"""Keeps the headroom of the running fleet up to date: gathered on the event loop, computed in a thread.

The costs are read in the thread too: of a thousand servers they are two million numbers. Samples may come meanwhile, so
that of the newest second some servers may be missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from controller.costs import HISTORY_S
from controller.headroom import Conduct, CostSource, Window, assess
from controller.headroom_islands import assess_islands, sampled
from controller.lab_schema import Headroom
from controller.policy.base import Binding, FleetView, bound_names
from controller.records import RoundEntry
from controller.schema import BudgetSpec, Mode, PolicySpec
from controller.shadow_book import Shadow, ShadowBook
from controller.state import FleetState
from controller.view import build_view

WINDOW_S = HISTORY_S
"""All that is known of the costs."""
EVERY_S = 30.0
"""A window of `WINDOW_S` takes some 20 ms of a thread for each policy; in per_island mode, of each island that is
looked at."""


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
            until_s = math.floor(now_s)
            view = build_view(self._state, now_s, with_costs=False)
            if self._state.settings.mode is Mode.PER_ISLAND and (places := _places(view)):
                windows = self._gather_each(places.keys(), now_s - window_s)
                return await asyncio.to_thread(self._assess_each, places, windows, until_s - window_s, until_s)
            servers, window = sorted(bound_names(view)), self._gather()
            return await asyncio.to_thread(self._assess, servers, window, until_s - window_s, until_s)

    def _assess(self, servers: Sequence[str], window: Window, since_s: int, until_s: int) -> Headroom:
        return assess(self._with_costs(window, servers, since_s, until_s))

    def _assess_each(
        self, places: Mapping[int, Sequence[str]], windows: Mapping[int, Window], since_s: int, until_s: int
    ) -> Headroom:
        each = [self._with_costs(windows[slot], servers, since_s, until_s) for slot, servers in places.items()]
        return assess_islands(each)

    def _with_costs(self, window: Window, servers: Sequence[str], since_s: int, until_s: int) -> Window:
        costs = self._costs.series(servers, since_s=since_s, until_s=until_s)
        return replace(window, since_s=until_s - len(costs), costs_per_s=costs)

    def _gather(self) -> Window:
        """All but the costs."""
        return self._window((self._conduct(map(_started_s, self._own_rounds())), *self._shadow_conducts()))

    def _gather_each(self, slots: Collection[int], since_s: float) -> dict[int, Window]:
        """As `_gather`, of single islands."""
        came = _by_slot(slots, _arrivals(self._own_rounds(), since_s))
        shadows = {shadow.spec.label: _by_slot(slots, shadow.starts_since(since_s)) for shadow in self._shadows.shadows}
        return {
            slot: self._window(
                (
                    self._conduct(came[slot]),
                    *(_in_shadow(shadow, shadows[shadow.spec.label][slot]) for shadow in self._shadows.shadows),
                )
            )
            for slot in slots
        }

    def _window(self, conducts: tuple[Conduct, ...]) -> Window:
        budget = self._state.budget.spec
        return Window(
            since_s=0.0,
            costs_per_s=(),
            syncs_per_s=_rate(budget),
            min_gap_s=budget.min_gap_s,
            sync_s=self._state.rounds.expected_sync_s(),
            conducts=conducts,
        )

    def _own_rounds(self) -> list[RoundEntry]:
        """Those of the policy in force."""
        name = self._in_force[0].name
        return [entry for entry in self._state.rounds.entries if entry.spent and entry.policy == name]

    def _conduct(self, starts_s: Iterable[float]) -> Conduct:
        spec, since_s = self._in_force
        return Conduct(policy=spec.label, shadow=False, since_s=since_s, starts_s=tuple(starts_s))

    def _shadow_conducts(self) -> list[Conduct]:
        return [_in_shadow(shadow, (start.t_s for start in shadow.starts)) for shadow in self._shadows.shadows]


def _in_shadow(shadow: Shadow, starts_s: Iterable[float]) -> Conduct:
    return Conduct(policy=shadow.spec.label, shadow=True, since_s=shadow.since_s, starts_s=tuple(starts_s))


def _places(view: FleetView) -> dict[int, list[str]]:
    """The servers beside each of the islands that are looked at; those that stand beside none are left out."""
    binding = Binding(view.servers)
    beside = {island.slot: binding.of(island.node, island.server_id) for island in view.islands}
    bound = {slot: sorted(server.server_id for server in servers) for slot, servers in beside.items() if servers}
    return {slot: bound[slot] for slot in sampled(sorted(bound))}


def _rate(budget: BudgetSpec) -> float | None:
    if budget.period_s is not None:
        return 1.0 / budget.period_s
    if budget.outer_syncs is None or budget.horizon_s is None:
        return None
    return budget.outer_syncs / budget.horizon_s


def _started_s(entry: RoundEntry) -> float:
    """When the first island left its inner loop for it; a directive may wait for a lull."""
    return min((one.report.started_s for one in entry.reports), default=entry.began_s)


def _arrivals(entries: Iterable[RoundEntry], since_s: float) -> Iterator[tuple[int, float]]:
    """Who left their inner loop for a round, and when."""
    for entry in entries:
        if entry.closed_s is None or entry.closed_s >= since_s:
            for one in entry.reports:
                yield one.slot, one.report.started_s


def _by_slot(slots: Collection[int], starts: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {slot: [] for slot in slots}
    for slot, start_s in starts:
        if slot in found:
            found[slot].append(start_s)
    return found
