"""The tick in per_island mode: a decision for each island, at most one open round, directives as islands come.

A tick has to stay short with a thousand islands, so what repeats costs nothing: an island that stays under ``min_h``,
or that is in the open round, is not asked again, and that it waits is journalled when the reason changes or every
``decision_journal_s``. Of more than `MAX_ASKED_PER_TICK` islands every second, third, ... has its turn at a tick: a
thousand are asked every other second. What a sync costs beside those that are asked next is learned between two ticks,
and only what is missing then within one. At most `MAX_TOLD_PER_TICK` are told to come at once; the others follow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from controller.islands import (
    RoundToJoin,
    as_join,
    decide_due,
    view_to_join,
    view_to_open,
)
from controller.metrics import Metrics
from controller.orders import islands_of, journal_decision, open_round, write_sync
from controller.policy.base import Binding, Decision, FleetView, IslandView, ServerView
from controller.policy.cost_view import CostView
from controller.policy.rule import fall_back
from controller.records import AgentRecord
from controller.schema import Action, DecisionRecord, Reason
from controller.state import FleetState

MAX_ASKED_PER_TICK = 250
FOLLOWED_AT_ONCE = 25
"""Some two milliseconds: each has a second or two of costs to learn from."""
MAX_TOLD_PER_TICK = 100
"""Each directive is numbered, journalled and handed out."""

T = TypeVar("T")

Decide = Callable[[FleetView, float], Decision]


@dataclass(frozen=True, slots=True)
class Noted:
    """The last decision about an island that was journalled."""

    reason: Reason
    t_s: float


class IslandsMode:
    """Decides for each island. Its memory is what was journalled last; the open round is the book's."""

    def __init__(
        self, state: FleetState, metrics: Metrics, *, decide: Decide, remember: Callable[[DecisionRecord], None]
    ) -> None:
        """``remember`` is told of every decision that is journalled."""
        self._state = state
        self._metrics = metrics
        self._decide = decide
        self._remember = remember
        self._noted: dict[int | None, Noted] = {}
        self._turn = 0

    def on_tick(self, fleet: FleetView, now_s: float) -> None:
        """Decide, journal, open the round with the first island that comes, and tell those that do."""
        if not fleet.islands:
            decided = self._decide(fleet, now_s)
            self._metrics.decisions.labels(self._state.policy.name, decided.action, decided.reason).inc()
            self._note(None, decided, fleet, now_s)
            return
        tick = _Tick(fleet, self._state, now_s)
        counts: Counter[tuple[Action, Reason]] = Counter()
        coming: list[DecisionRecord] = []
        for island in self._next_share(fleet.islands):
            decision = self._decide_island(island, tick, num_coming=len(coming))
            if isinstance(decision, Reason):
                counts[Action.DEFER, decision] += 1
                continue
            counts[decision.action, decision.reason] += 1
            record = self._note(island.slot, decision, fleet, now_s, joins=tick.joins)
            if decision.action is Action.SYNC and record is not None:
                coming.append(record)
                tick.joins = tick.joins or self._open(record, fleet, tick)
        for (action, reason), number in counts.items():
            self._metrics.decisions.labels(self._state.policy.name, action, reason).inc(number)
        self._tell(coming, fleet, now_s)

    def call_all(self, fleet: FleetView, now_s: float, *, dry_run: bool) -> int | None:
        """Tell all islands to come that are not in the open round yet; how many, None when no round is open to join."""
        tick = _Tick(fleet, self._state, now_s)
        if tick.joins is None:
            return None
        called = [island for island in fleet.islands if tick.joins.is_open_to(island.slot) and island.ready]
        coming = []
        if not dry_run:
            for island in called:
                forced = decide_due(tick.view_to_join(island, tick.joins), now_s)
                decision = Decision(action=Action.SYNC, reason=Reason.MANUAL, terms=forced.terms)
                record = self._note(island.slot, decision, fleet, now_s, joins=tick.joins)
                coming += [record] if record is not None else []
            self._metrics.decisions.labels(self._state.policy.name, Action.SYNC, Reason.MANUAL).inc(len(coming))
        self._tell(coming, fleet, now_s)
        return len(called)

    def next_asked(self) -> list[list[AgentRecord]]:
        """The islands of the next tick's share, some at a time."""
        islands = _share(self._state.registry.islands, self._turn + 1)
        return [list(islands[at : at + FOLLOWED_AT_ONCE]) for at in range(0, len(islands), FOLLOWED_AT_ONCE)]

    def follow_costs(self, islands: Sequence[AgentRecord], now_s: float) -> None:
        """Learn what syncs beside these would have cost until now."""
        places = [(island.node, island.server_id) for island in islands]
        binding = Binding(self._state.samples.views_beside(places, now_s))
        sync_s = self._state.rounds.expected_sync_s()
        for place in places:
            names = tuple(server.server_id for server in binding.of(*place))
            if names:
                self._state.costs.view(names, now_s=now_s, sync_s=sync_s)

    def _next_share(self, islands: tuple[IslandView, ...]) -> Sequence[IslandView]:
        self._turn += 1
        return _share(islands, self._turn)

    def _decide_island(self, island: IslandView, tick: _Tick, *, num_coming: int) -> Decision | Reason:
        """The decision; a bare reason to wait where nobody need be asked, and the journal has it already."""
        noted, joins, now_s = self._noted.get(island.slot), tick.joins, tick.now_s
        if num_coming >= MAX_TOLD_PER_TICK:
            return Reason.SYNC_IN_FLIGHT
        if joins is None:
            waits = Reason.BELOW_MIN_H if tick.is_calm and island.inner_steps_since_sync < tick.fleet.min_h else None
        else:
            waits = None if joins.is_open_to(island.slot) else Reason.SYNC_IN_FLIGHT
        if waits is not None and noted is not None and noted.reason is waits and not self._is_stale(noted, now_s):
            return waits
        if joins is None:
            return self._decide(tick.view_to_open(island), now_s)
        view = tick.view_to_join(island, joins)
        if waits is not None:
            return Decision(action=Action.DEFER, reason=waits, terms=fall_back(view, now_s).terms)
        return decide_due(view, now_s) if tick.is_due else as_join(self._decide(view, now_s))

    def _is_stale(self, noted: Noted, now_s: float) -> bool:
        return now_s - noted.t_s >= self._state.settings.decision_journal_s

    def _note(
        self,
        slot: int | None,
        decision: Decision,
        fleet: FleetView,
        now_s: float,
        *,
        joins: RoundToJoin | None = None,
    ) -> DecisionRecord | None:
        """Journal the decision if it is news; every sync is."""
        noted = self._noted.get(slot)
        is_old = noted is not None and noted.reason is decision.reason and not self._is_stale(noted, now_s)
        if decision.action is Action.DEFER and is_old:
            return None
        self._noted[slot] = Noted(decision.reason, now_s)
        round_number = fleet.round if joins is None else joins.round
        slots = () if slot is None else (slot,)
        record = journal_decision(self._state, decision, round_number=round_number, slots=slots, slot=slot, now_s=now_s)
        self._remember(record)
        return record

    def _open(self, record: DecisionRecord, fleet: FleetView, tick: _Tick) -> RoundToJoin:
        """Open the round that everybody who is ready comes to, now or until it is due."""
        syncing = {island.slot for island in fleet.islands if island.syncing}
        slots = tuple(island.slot for island in fleet.islands if island.ready)
        # Whoever began it by themselves is in it already.
        open_round(self._state, record, slots=slots, directed=tuple(sorted(syncing & set(slots))))
        joins = tick.read_open()
        assert joins is not None, "it was opened a moment ago"
        return joins

    def _tell(self, coming: list[DecisionRecord], fleet: FleetView, now_s: float) -> None:
        entry = self._state.rounds.open
        if not coming or entry is None:
            return
        syncing = {island.slot for island in fleet.islands if island.syncing}
        by_slot = {record.slot: record for record in coming if record.slot is not None}
        entry = self._state.rounds.join(entry, by_slot)
        for island in islands_of(self._state, by_slot.keys() - syncing):
            assert island.slot is not None
            write_sync(self._state, [island], entry, reason=by_slot[island.slot].reason, now_s=now_s)


def _share(islands: Sequence[T], turn: int) -> Sequence[T]:
    """The islands whose turn it is: all of them, while they are few."""
    num_turns = max(1, math.ceil(len(islands) / MAX_ASKED_PER_TICK))
    return islands[turn % num_turns :: num_turns]


class _Tick:
    """What the decisions of one tick share."""

    def __init__(self, fleet: FleetView, state: FleetState, now_s: float) -> None:
        self.fleet = fleet
        self.now_s = now_s
        self._num_unready = sum(not island.ready for island in fleet.islands)
        keeps_all = fleet.paused or fleet.round_to_join or fleet.sync_in_flight or fleet.slots_missing
        self.is_calm = not keeps_all and self._num_unready == 0
        """Whether nothing but its own H keeps an island that is under ``min_h``."""
        self._state = state
        self._binding = Binding(fleet.servers)
        self._last_sync_s = {
            island.slot: island.progress.last_sync_at_s
            for island in state.registry.islands
            if island.progress is not None
        }
        self.joins = self.read_open()

    def read_open(self) -> RoundToJoin | None:
        """The directed round that is open; islands that began one by themselves are joined by the guard's rule."""
        entry = self._state.rounds.open
        if entry is None or entry.directed_s is None:
            return None
        return RoundToJoin(
            round=entry.round,
            opened_s=entry.directed_s,
            due_s=entry.directed_s + self._state.settings.sync_times.join_s,
            expected=frozenset(entry.expected),
            told=entry.told,
        )

    @property
    def is_due(self) -> bool:
        return self.joins is not None and self.joins.is_due(self.fleet, self.now_s)

    def view_to_open(self, island: IslandView) -> FleetView:
        servers = self._servers_of(island)
        return view_to_open(
            self.fleet,
            island,
            servers,
            costs=self.follow_costs(servers),
            last_sync_s=self._last_sync_s.get(island.slot),
            num_unready=self._num_unready,
            now_s=self.now_s,
        )

    def view_to_join(self, island: IslandView, joins: RoundToJoin) -> FleetView:
        servers, last_sync_s = self._servers_of(island), self._last_sync_s.get(island.slot)
        costs = self.follow_costs(servers)
        return view_to_join(self.fleet, island, servers, joins, costs=costs, last_sync_s=last_sync_s)

    def follow_costs(self, servers: tuple[ServerView, ...]) -> CostView | None:
        """What a sync beside these servers costs; None while nobody can say."""
        names = tuple(server.server_id for server in servers)
        return self._state.costs.view(names, now_s=self.now_s, sync_s=self.fleet.expected_sync_s) if names else None

    def _servers_of(self, island: IslandView) -> tuple[ServerView, ...]:
        return self._binding.of(island.node, island.server_id)
