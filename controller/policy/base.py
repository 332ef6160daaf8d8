"""What a policy sees and says.

A policy is pure: `Policy.decide(view, now_s)` reads no clock and keeps no state, so that the controller and the
simulator run the same code. In synchronous mode all islands sync together, hence one decision for the whole run.
Its group view is

    H          the least of the islands' inner steps since their sync
    pressure   the highest of the servers that islands are bound to; an unknown one counts as full (1.0)
    loss drop  the mean over the islands that know theirs
    tokens     the sum over islands since the last sync
    staleness  seconds since the last outer sync, or since the run began
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.policy.cost_view import CostView
from controller.schema import Action, Reason

UNKNOWN_PRESSURE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandView:
    """One live island that holds a slot."""

    slot: int
    node: str
    server_id: str | None
    ready: bool
    """Whether it has reported progress since it started or last synced."""
    inner_steps_since_sync: int = 0
    tokens_since_sync: int = 0
    tokens: int = 0
    """Since the run began."""
    loss: float | None = None
    loss_at_sync: float | None = None
    step_time_s: float | None = None
    syncing: bool = False
    """Whether it is in a sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One vLLM server; ``pressure_frac`` is None while its load is unknown."""

    server_id: str
    node: str
    pressure_frac: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """The running budget period. ``last_sync_s`` is when the last outer sync started."""

    outer_syncs: int | None = None
    horizon_s: float | None = None
    min_gap_s: float = 0.0
    syncs_per_hour: float | None = None
    max_defer_s: float | None = None
    started_s: float = 0.0
    spent: int = 0
    last_sync_s: float | None = None

    @property
    def remaining(self) -> int | None:
        return None if self.outer_syncs is None else max(0, self.outer_syncs - self.spent)

    @property
    def period_s(self) -> float | None:
        """Seconds per sync of a budget that is a rate."""
        return None if self.syncs_per_hour is None else 3600.0 / self.syncs_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Everything that a policy may look at, as of one moment."""

    islands: tuple[IslandView, ...]
    servers: tuple[ServerView, ...]
    """Those that islands may compete with."""
    budget: BudgetView
    min_h: int
    max_h: int
    run_started_s: float
    round: int = 0
    """Version of the global parameters: outer steps taken so far."""
    slots_missing: int = 0
    """Slots that no island has ever taken in this run."""
    paused: bool = False
    sync_in_flight: bool = False
    round_to_join: bool = False
    """Some islands began the open round by themselves, and there are others that could come in."""
    retry_at_s: float | None = None
    """After a round that failed: no new one before this time."""
    expected_sync_s: float = 2.0
    """Seconds from a directive until the round is closed, as observed lately."""
    last_transfer_s: float | None = None
    """Upload time of the last sync; None before the first."""
    reaction_s: float = 0.0
    """Seconds by which progress, decision and directive may lag: a heartbeat and a tick."""
    costs: CostView | None = None
    """What a sync costs now and cost lately; None while the cost of one of the bound servers is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether to sync now, why, and every term that led there."""

    action: Action
    reason: Reason
    terms: Mapping[str, float]


class Policy(Protocol):
    """Decides for the whole run. ``name`` is the one in `PolicySpec`."""

    @property
    def name(self) -> str: ...

    @property
    def syncs(self) -> bool:
        """False for a policy that never syncs: then islands must not sync by themselves either."""
        ...

    def decide(self, view: FleetView, now_s: float) -> Decision: ...


def ask(policy: Policy, view: FleetView, now_s: float) -> Decision:
    """What the policy says.

    Raises:
        ArithmeticError: a term is not finite, so that nobody could say why.
        TypeError: action or reason is none that there is, so that nobody could note it down.
    """
    decision = policy.decide(view, now_s)
    if not isinstance(decision.action, Action) or not isinstance(decision.reason, Reason):
        raise TypeError(f"{decision.action!r} because {decision.reason!r} are no Action and no Reason")
    broken = [name for name, value in decision.terms.items() if not math.isfinite(value)]
    if broken:
        raise ArithmeticError(f"terms are not finite: {', '.join(broken)}")
    return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The islands seen as one (see the module docstring)."""

    h: int
    h_max: int
    pressure: float
    unknown_servers: int
    loss_drop: float | None
    tokens: int
    staleness_s: float
    step_time_s: float

    def terms(self) -> dict[str, float]:
        known = {} if self.loss_drop is None else {"loss_drop": self.loss_drop}
        return known | {
            "h": float(self.h),
            "h_max": float(self.h_max),
            "pressure": self.pressure,
            "unknown_servers": float(self.unknown_servers),
            "tokens": float(self.tokens),
            "staleness_s": self.staleness_s,
        }


def summarize(view: FleetView, now_s: float) -> Group:
    """The group view of the islands that are ready (of none: no steps, and full pressure)."""
    ready = [island for island in view.islands if island.ready]
    steps = [island.inner_steps_since_sync for island in ready]
    drops = [i.loss_at_sync - i.loss for i in ready if i.loss is not None and i.loss_at_sync is not None]
    pressure, unknown = group_pressure(view)
    last_s = view.budget.last_sync_s if view.budget.last_sync_s is not None else view.run_started_s
    return Group(
        h=min(steps, default=0),
        h_max=max(steps, default=0),
        pressure=pressure,
        unknown_servers=unknown,
        loss_drop=sum(drops) / len(drops) if drops else None,
        tokens=sum(island.tokens_since_sync for island in ready),
        staleness_s=max(0.0, now_s - last_s),
        step_time_s=max((island.step_time_s or 0.0 for island in ready), default=0.0),
    )


def group_pressure(view: FleetView) -> tuple[float, int]:
    """Highest pressure of the bound servers, and how many of them are unknown.

    An island without any server is bound to an unknown one: nobody can say what a sync would cost there.
    """
    bound, unbound = bound_servers(view.islands, view.servers)
    known = [server.pressure_frac for server in bound if server.pressure_frac is not None]
    unknown = unbound + len(bound) - len(known)
    if unknown or not known:
        return UNKNOWN_PRESSURE, unknown
    return max(known), 0


class Binding:
    """Which servers an island competes with: the one that it names, else all of its node."""

    def __init__(self, servers: Iterable[ServerView]) -> None:
        self._by_id = {server.server_id: server for server in servers}
        self._by_node: dict[str, tuple[ServerView, ...]] | None = None
        """Only once an island asks that names no server."""

    def of(self, node: str, server_id: str | None) -> tuple[ServerView, ...]:
        """Empty when none of them is known: then nobody can say how loaded they are."""
        if server_id is not None:
            named = self._by_id.get(server_id)
            return () if named is None else (named,)
        if self._by_node is None:
            by_node: dict[str, list[ServerView]] = {}
            for server in self._by_id.values():
                by_node.setdefault(server.node, []).append(server)
            self._by_node = {node: tuple(found) for node, found in by_node.items()}
        return self._by_node.get(node, ())


def bound_servers(islands: Iterable[IslandView], servers: Iterable[ServerView]) -> tuple[tuple[ServerView, ...], int]:
    """The servers that islands compete with, each once, and how many islands have none."""
    binding = Binding(servers)
    bound: dict[str, ServerView] = {}
    unbound = 0
    for island in islands:
        found = binding.of(island.node, island.server_id)
        for server in found:
            bound[server.server_id] = server
        unbound += not found
    return tuple(bound.values()), unbound


def bound_names(view: FleetView) -> frozenset[str]:
    """Ids of the servers that a sync of all islands burdens; one that an island names counts before it is heard of."""
    named = {island.server_id for island in view.islands if island.server_id is not None}
    return frozenset(named | {server.server_id for server in bound_servers(view.islands, view.servers)[0]})


def saturate(value: float) -> float:
    """Clip to [0, 1]."""
    return min(1.0, max(0.0, value))
