"""Wire contract of ``GET /v1/events``: what the dashboard shows.

A `Frame` comes first whole (event ``snapshot``), then about once a second with what has changed (event ``tick``): rows
are replaced by their key, what is None has not changed. Ages are left to the reader, who has ``t_s`` and the row's own
time: so a row that stands still is not sent again. A value that is unknown is None, in every row.
"""

from __future__ import annotations

from pydantic import Field

from controller.records import Membership
from controller.schema import Action, BudgetStatus, PolicySpec, Recovery
from diloco.schema import Phase
from service.wire import Wire
from sidecar.schema import EngineState, ForecastPoint, LoadSample, PhaseName


class ServerRow(Wire):
    """One server; the key is ``server_id``."""

    server_id: str
    node: str
    state: EngineState
    known: bool
    """False when the newest sample is too old or says nothing: load unknown, counted as full."""
    t_s: float
    """Unix time of the newest sample."""
    running: float | None
    waiting: float | None
    kv_usage_frac: float | None
    pressure_frac: float | None
    arrivals_per_s: float | None
    trainer_phase: PhaseName | None
    pace: float | None
    gate_busy: bool | None
    gate_reason: str | None
    sync_cost_per_s: float | None
    slo_target_frac: float | None
    slo_requests_1m: float | None
    """Requests judged within the last minute; None when no sample told of any."""
    slo_violations_1m: float | None
    slo_requests_5m: float | None
    slo_violations_5m: float | None


class IslandRow(Wire):
    """One agent, with or without a slot; the key is ``agent_id``."""

    agent_id: str
    slot: int | None
    node: str
    server_id: str | None
    epoch: int
    membership: Membership
    beat_s: float
    """Unix time of the last heartbeat."""
    current: bool
    """False when what it told last is not known to hold any more (a sync ended, or its lease)."""
    step: int | None
    h: int | None
    loss: float | None
    loss_at_sync: float | None
    phase: Phase | None
    round: int | None
    tokens: int | None
    step_time_s: float | None
    restarts: int | None
    skipped_steps: int | None
    yielded_s: float | None
    yield_reason: str | None


class DecisionRow(Wire):
    """Decisions in a row that say the same, told as one; the key is ``first_id``."""

    first_id: int
    last_id: int
    first_s: float
    last_s: float
    count: int
    policy: str
    action: Action
    reason: str
    round: int
    slot: int | None
    shadow: bool
    terms: dict[str, float]
    """Of the last of them."""


class RoundRow(Wire):
    """One outer round; the key is ``id``, since a round that failed is tried again under its number."""

    id: int
    round: int
    outcome: str
    """``open``, or how it ended."""
    policy: str
    reason: str
    began_s: float
    closed_s: float | None
    duration_s: float | None
    """From its begin to the last report; None before one."""
    slots_applied: tuple[int, ...]
    slots_late: tuple[int, ...]
    slots_failed: tuple[int, ...]
    bytes_total: int
    spent: bool
    """Whether it counts as a sync of the budget."""


class BudgetView(Wire):
    """The budget, and when its syncs were spent."""

    status: BudgetStatus
    spent_at_s: tuple[float, ...]
    """When the rounds that count began, oldest first; those that are known."""


class RunStatus(Wire):
    """What is true of the whole run."""

    run_id: str
    run_started_s: float
    paused: bool
    epoch: int
    round: int
    """Outer steps taken so far."""
    rounds_closed: int
    num_slots: int
    min_h: int
    max_h: int
    lease_timeout_s: float
    stale_after_s: float
    policy: PolicySpec
    journal_failure: str | None


class Totals(Wire):
    """Counts over the whole fleet, also where not all rows are sent."""

    servers: int
    servers_unknown: int
    agents: int
    islands_alive: int
    server_rows: int
    """Rows that the events carry: of a large fleet only the servers under the highest pressure."""
    island_rows: int


class Frame(Wire):
    """One event."""

    t_s: float
    """Unix time of the controller."""
    run: RunStatus | None = None
    totals: Totals | None = None
    budget: BudgetView | None = None
    servers: list[ServerRow] = Field(default_factory=list)
    servers_gone: list[str] = Field(default_factory=list)
    islands: list[IslandRow] = Field(default_factory=list)
    islands_gone: list[str] = Field(default_factory=list)
    decisions: list[DecisionRow] = Field(default_factory=list)
    rounds: list[RoundRow] = Field(default_factory=list)
    recoveries: list[Recovery] = Field(default_factory=list)


class FoundRows(Wire):
    """``GET /v1/fleet/rows?contains=&limit=``: servers and islands by a part of their names."""

    t_s: float
    servers: list[ServerRow]
    servers_found: int
    islands: list[IslandRow]
    islands_found: int


class LoadBin(Wire):
    """What one server's samples said within `BIN_S` seconds."""

    t_s: float
    """Unix time of the bin's end."""
    in_engine: float | None
    """Mean of running and waiting requests."""
    arrivals_per_s: float | None
    requests: float | None
    violations: float | None


class ServerHistory(Wire):
    """``GET /v1/history?server_id=``: the last minutes of one server, and its forecast."""

    server_id: str
    t_s: float
    """Unix time of the controller."""
    bin_s: float
    bins: list[LoadBin]
    """Oldest first; without those in which no sample came."""
    sample: LoadSample
    """The newest."""
    forecast_t_s: float | None
    """Unix time at which the forecast was made; None without one."""
    forecast: tuple[ForecastPoint, ...]
    """By horizon, from then on."""
