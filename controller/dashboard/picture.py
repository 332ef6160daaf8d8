"""One look at the controller's state, and what has changed since the one before (pure but for reading the state).

Of a fleet with more than `MAX_SERVER_ROWS` servers the rows are those whose load is unknown, then those under the
highest pressure: the ones that hold syncs up. Of more than `MAX_ISLAND_ROWS` agents: those that were lost, then slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from controller.core import Controller
from controller.dashboard.history import BIN_S
from controller.dashboard.recent import Recent
from controller.dashboard.schema import (
    BudgetView,
    DecisionRow,
    FoundRows,
    Frame,
    IslandRow,
    RoundRow,
    RunStatus,
    ServerHistory,
    ServerRow,
    Totals,
)
from controller.records import AgentRecord, Membership, RoundEntry
from controller.rounds import outcome_of
from controller.schema import Recovery
from controller.state import FleetState
from service.errors import InputError
from sidecar.schema import LoadSample

MAX_SERVER_ROWS = 300
MAX_ISLAND_ROWS = 300
MAX_DECISION_ROWS = 200
MAX_ROUND_ROWS = 100

K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What the page shows, as of one moment; rows by their keys."""

    t_s: float
    run: RunStatus
    totals: Totals
    budget: BudgetView
    servers: Mapping[str, ServerRow]
    islands: Mapping[str, IslandRow]
    decisions: Mapping[int, DecisionRow]
    rounds: Mapping[int, RoundRow]
    recoveries: Mapping[tuple[int, str, float], Recovery]


def take_picture(controller: Controller) -> Picture:
    state, recent, now_s = controller.state, controller.recent, controller.clock()
    seen = list(state.samples.newest(now_s))
    agents = state.registry.agents
    servers = heapq.nlargest(MAX_SERVER_ROWS, seen, key=_weight)
    islands = heapq.nsmallest(MAX_ISLAND_ROWS, agents, key=_rank)
    return Picture(
        t_s=now_s,
        run=_run_status(state),
        totals=Totals(
            servers=len(seen),
            servers_unknown=sum(not known for _, known in seen),
            agents=len(agents),
            islands_alive=len(state.registry.islands),
            server_rows=len(servers),
            island_rows=len(islands),
        ),
        budget=_budget_view(state),
        servers={sample.server_id: to_server_row(sample, known, recent, now_s) for sample, known in servers},
        islands={agent.agent_id: to_island_row(agent) for agent in islands},
        decisions={row.first_id: row for row in recent.decisions.newest(MAX_DECISION_ROWS)},
        rounds={entry.id: to_round_row(entry) for entry in state.rounds.entries[-MAX_ROUND_ROWS:]},
        recoveries={(row.recovery, row.kind, row.t_s): row for row in recent.recoveries},
    )


def whole(picture: Picture) -> Frame:
    return Frame(
        t_s=picture.t_s,
        run=picture.run,
        totals=picture.totals,
        budget=picture.budget,
        servers=list(picture.servers.values()),
        islands=list(picture.islands.values()),
        decisions=list(picture.decisions.values()),
        rounds=list(picture.rounds.values()),
        recoveries=list(picture.recoveries.values()),
    )


def difference(before: Picture, after: Picture) -> Frame:
    """What turns ``before`` into ``after``. Rows of the past (decisions, rounds, recoveries) only come: their reader
    keeps as many as it likes."""
    return Frame(
        t_s=after.t_s,
        run=after.run if after.run != before.run else None,
        totals=after.totals if after.totals != before.totals else None,
        budget=after.budget if after.budget != before.budget else None,
        servers=_changed(before.servers, after.servers),
        servers_gone=[key for key in before.servers if key not in after.servers],
        islands=_changed(before.islands, after.islands),
        islands_gone=[key for key in before.islands if key not in after.islands],
        decisions=_changed(before.decisions, after.decisions),
        rounds=_changed(before.rounds, after.rounds),
        recoveries=_changed(before.recoveries, after.recoveries),
    )


def _changed(before: Mapping[K, R], after: Mapping[K, R]) -> list[R]:
    return [row for key, row in after.items() if before.get(key) != row]


def find_rows(controller: Controller, text: str, *, limit: int) -> FoundRows:
    """The first servers and islands whose name, node or (for islands) server contains ``text``, by name."""
    state, now_s, wanted = controller.state, controller.clock(), text.lower()
    servers = [
        (sample, known)
        for sample, known in state.samples.newest(now_s)
        if _contains(wanted, (sample.server_id, sample.node))
    ]
    servers.sort(key=lambda found: found[0].server_id)
    agents = [a for a in state.registry.agents if _contains(wanted, (a.agent_id, a.node, a.server_id or ""))]
    return FoundRows(
        t_s=now_s,
        servers=[to_server_row(sample, known, controller.recent, now_s) for sample, known in servers[:limit]],
        servers_found=len(servers),
        islands=[to_island_row(agent) for agent in agents[:limit]],
        islands_found=len(agents),
    )


def _contains(wanted: str, names: Iterable[str]) -> bool:
    return any(wanted in name.lower() for name in names)


def read_history(controller: Controller, server_id: str) -> ServerHistory:
    """One server's last minutes.

    Raises:
        InputError: no server of that name has sent samples lately.
    """
    sample = controller.state.samples.find(server_id)
    if sample is None:
        raise InputError(
            f"no server {server_id} has sent samples lately", field="server_id", remedy="see GET /v1/fleet"
        )
    bins = controller.recent.history.bins(server_id)
    forecast_t_s, forecast = controller.state.samples.forecast(server_id) or (None, ())
    return ServerHistory(
        server_id=server_id,
        t_s=controller.clock(),
        bin_s=BIN_S,
        bins=bins,
        sample=sample,
        forecast_t_s=forecast_t_s,
        forecast=forecast,
    )


def to_server_row(sample: LoadSample, known: bool, recent: Recent, now_s: float) -> ServerRow:
    minute = recent.history.slo(sample.server_id, since_s=now_s - 60)
    five = recent.history.slo(sample.server_id, since_s=now_s - 300)
    arrivals, interval_s = sample.arrivals, sample.interval_s
    return ServerRow(
        server_id=sample.server_id,
        node=sample.node,
        state=sample.state,
        known=known,
        t_s=sample.t_s,
        running=sample.running,
        waiting=sample.waiting,
        kv_usage_frac=sample.kv_usage_frac,
        pressure_frac=sample.pressure_frac,
        arrivals_per_s=None if arrivals is None or interval_s is None else arrivals / interval_s,
        trainer_phase=sample.trainer_phase,
        pace=sample.pace,
        gate_busy=sample.gate_busy,
        gate_reason=sample.gate_reason,
        sync_cost_per_s=sample.sync_cost_per_s,
        slo_target_frac=sample.slo_target_frac,
        slo_requests_1m=minute and minute.requests,
        slo_violations_1m=minute and minute.violations,
        slo_requests_5m=five and five.requests,
        slo_violations_5m=five and five.violations,
    )


def to_island_row(agent: AgentRecord) -> IslandRow:
    told = agent.progress
    return IslandRow(
        agent_id=agent.agent_id,
        slot=agent.slot,
        node=agent.node,
        server_id=agent.server_id,
        epoch=agent.granted_epoch,
        membership=agent.membership,
        beat_s=agent.last_beat_s,
        current=agent.progress_current,
        step=told and told.step,
        h=told and told.inner_steps_since_sync,
        loss=told and told.loss,
        loss_at_sync=told and told.loss_at_sync,
        phase=told and told.phase,
        round=told and told.round,
        tokens=told and told.tokens,
        step_time_s=told and told.step_time_s,
        restarts=told and told.restarts,
        skipped_steps=told and told.skipped_steps,
        yielded_s=told and told.yielded_s,
        yield_reason=told and told.yield_reason,
    )


def to_round_row(entry: RoundEntry) -> RoundRow:
    record = entry.to_record()
    duration_s = None if record.finished_s is None else max(0.0, record.finished_s - entry.began_s)
    return RoundRow(
        id=entry.id,
        round=entry.round,
        outcome=outcome_of(entry) if record.closed else "open",
        policy=entry.policy,
        reason=entry.reason,
        began_s=entry.began_s,
        closed_s=entry.closed_s,
        duration_s=duration_s,
        slots_applied=record.slots_applied,
        slots_late=record.slots_late,
        slots_failed=record.slots_failed,
        bytes_total=record.bytes_total,
        spent=entry.spent,
    )


def _weight(seen: tuple[LoadSample, bool]) -> float:
    sample, known = seen
    return sample.pressure_frac if known and sample.pressure_frac is not None else 2.0


def _rank(agent: AgentRecord) -> tuple[bool, int, str]:
    """The lost first, then by slot, spares and those who left last."""
    last = agent.slot if agent.slot is not None else 1 << 20
    return agent.membership is not Membership.LOST, last, agent.agent_id


def _run_status(state: FleetState) -> RunStatus:
    settings = state.settings
    return RunStatus(
        run_id=state.run_id,
        run_started_s=state.run_started_s,
        paused=state.paused,
        epoch=state.registry.epoch,
        round=state.version,
        rounds_closed=state.rounds.num_applied,
        num_slots=settings.num_slots,
        min_h=settings.min_h,
        max_h=settings.max_h,
        lease_timeout_s=settings.lease_timeout_s,
        stale_after_s=settings.stale_after_s,
        policy=state.policy_spec,
        journal_failure=state.journal.failure,
    )


def _budget_view(state: FleetState) -> BudgetView:
    began = sorted(entry.began_s for entry in state.rounds.entries if entry.spent)
    return BudgetView(status=state.budget, spent_at_s=tuple(at_s for at_s in began if at_s >= state.budget.started_s))
