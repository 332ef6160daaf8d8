"""Wire contract of the controller: samples in, registry, directives, decisions, policy, budget.

Wall-clock times are Unix seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

from pydantic import Field, model_validator

from controller.recovery_schema import Recovery as Recovery
from controller.recovery_schema import RecoveryKind as RecoveryKind
from controller.recovery_schema import RecoveryPage as RecoveryPage
from controller.recovery_schema import RecoveryRecord as RecoveryRecord
from diloco.recovery_schema import (
    MAX_REPLICAS_TOLD,
    HandoverReport,
    Peer,
    ReplicaNotice,
    ReplicaPlace,
)
from diloco.schema import DEFAULT_SYNC_TIMEOUT_S, MAX_FRAGMENTS, Progress, Protection, Restart, Slot, SyncReport
from service.wire import Order, Wire
from sidecar.schema import LoadSample, Name

MAX_BATCH_SAMPLES = 20_000


class Mode(StrEnum):
    """Who comes to a round, and when."""

    SYNCHRONOUS = "synchronous"
    """One decision for the whole run: all islands come at once and wait for the result. DiLoCo as it is published."""
    PER_ISLAND = "per_island"
    """Each island has decisions of its own: a round opens with the first, the others come at their own best moment
    until it is due, and all train on while it is open."""


class SampleBatch(Wire):
    """``POST /v1/samples``. Samples are judged one by one: a bad one is refused with a reason, the others count."""

    samples: list[Any] = Field(max_length=MAX_BATCH_SAMPLES)
    """`sidecar.schema.LoadSample` objects."""


class RejectedSample(Wire):
    index: int
    reason: str
    detail: str = ""


class SampleReceipt(Wire):
    accepted: int
    rejected: list[RejectedSample]


class AgentRegistration(Wire):
    """``POST /v1/agents``. Repeating it is harmless; a new ``instance`` under a live ``agent_id`` is refused (409)."""

    agent_id: Name
    instance: str = Field(min_length=1, max_length=64)
    """Random name of this very process: tells a restarted agent from a second one with the same id."""
    node: Name
    server_id: Name | None = None
    """Server whose load this island competes with; None binds it by ``node``."""
    slot: Slot | None = None
    """Slot that the agent asks for (one it held before, or a fixed one); None takes the lowest free one."""
    url: str | None = Field(default=None, max_length=512, pattern=r"^https?://")
    """Where the agent's own HTTP service listens."""
    num_parameters: int | None = Field(default=None, ge=1)
    num_fragments: int = Field(default=1, ge=1, le=MAX_FRAGMENTS)
    """Most parts of the parameters that its worker can sync one by one; how many there are, the lease says."""
    keeps_replicas: bool = False
    """It can keep replicas of other slots' state, at ``url``."""
    hands_over: bool = False
    """It knows the directive `hand_over`, and sends its state before it gives its slot up."""
    replicas: tuple[ReplicaNotice, ...] = Field(default=(), max_length=MAX_REPLICAS_TOLD)
    """What it keeps of other slots now."""


class Autonomy(Wire):
    """What an island may do by itself while the controller is away: sync at ``max_h``, within what is left to spend."""

    allowed: bool = True
    """False under `no_sync`."""
    max_syncs: int | None = Field(default=None, ge=0)
    """Outer syncs that the budget had left; None is unlimited."""
    min_gap_s: float = Field(default=0.0, ge=0)
    until_s: float | None = None
    """Unix time at which the budget's horizon ends; None: it has none."""


class AgentLease(Wire):
    """What a registered agent may do until its lease ends (heartbeats renew it)."""

    agent_id: str
    slot: int | None
    """None: no free slot; the agent waits as a spare."""
    epoch: int
    run_id: str
    min_h: int
    max_h: int
    heartbeat_interval_s: float
    lease_timeout_s: float
    synchronizer_url: str | None
    directive_seq: int
    """Poll with ``after`` this number: older directives are over. A sync that waits for the slot is sent anew."""
    resume: Progress | None = None
    """How far the slot had come before this agent took it, as far as was reported: its data goes on from there."""
    paused: bool = False
    autonomy: Autonomy
    sync_timeout_s: float = Field(default=DEFAULT_SYNC_TIMEOUT_S, gt=0)
    """From the directive of a round until its islands give up on it; all other deadlines follow (`SyncTimes`)."""
    num_fragments: int = Field(default=1, ge=1, le=MAX_FRAGMENTS)
    """Parts of the parameters that sync in turn in this run, one in each round."""
    buddies: tuple[Peer, ...] = ()
    """Who keeps replicas of the slot's state; empty: nobody does."""
    replicas: tuple[ReplicaPlace, ...] = ()
    """Complete replicas of the slot's state, as their keepers tell, the newest first."""
    keeps_slots: tuple[int, ...] = ()
    """Slots whose replicas this agent is to keep; those of others it may let go."""


class Heartbeat(Wire):
    """``POST /v1/agents/{id}/heartbeat``. An old epoch or a foreign instance is refused (409): register again."""

    instance: str
    epoch: int
    t_s: float = Field(ge=0)
    progress: Progress | None = None
    syncs: list[SyncReport] = Field(default_factory=list, max_length=1000)
    """Syncs that ended since the last acknowledged heartbeat."""
    restarts: list[Restart] = Field(default_factory=list, max_length=100)
    """Recoveries of its workers that ended since the last heartbeat that was answered."""
    protection: Protection | None = None
    """What a death would cost now; None without snapshots."""
    replicas: tuple[ReplicaNotice, ...] | None = Field(default=None, max_length=MAX_REPLICAS_TOLD)
    """What the agent keeps of other slots now; None: as it said last."""
    handed_over: HandoverReport | None = None
    """Answer to the directive `hand_over`."""


class HeartbeatReply(Wire):
    epoch: int
    directive_seq: int
    syncs_acknowledged: int
    paused: bool
    autonomy: Autonomy
    buddies: tuple[Peer, ...] = ()
    """As in the lease."""
    keeps_slots: tuple[int, ...] = ()
    """As in the lease."""


class DirectiveKind(StrEnum):
    SYNC = "sync"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    RENEW = "renew"
    """Register again now: the slot, or what is known of its state, has changed."""
    HAND_OVER = "hand_over"
    """End the step, send the slot's state to ``taker`` (the buddies, if there is none), and say so."""


class Directive(Wire):
    """An order to one island."""

    seq: int
    kind: DirectiveKind
    epoch: int
    t_s: float
    round: int | None = None
    """For `sync`: number of the round. The island contributes to it, or to the next one if it is over."""
    quorum: int | None = Field(default=None, ge=1)
    """For `sync`: how many contributions the round must have; it need not wait for more."""
    expected: int | None = Field(default=None, ge=1)
    """For `sync`: how many islands are told to come to the round."""
    fragments: tuple[int, ...] = (0,)
    """For `sync`: what the round moves, which follows from its number."""
    not_before_s: float | None = None
    deadline_s: float | None = None
    """For `sync`: the island gives up waiting for the round after this Unix time and trains on."""
    close_by_s: float | None = None
    """For `sync`: Unix time by which the synchronizer closes the round with those who came."""
    overlap: bool = False
    """For `sync`: the island takes inner steps while the round is open."""
    taker: Peer | None = None
    """For `hand_over`: who is to have the slot."""
    reason: str = ""


class Directives(Wire):
    """``GET /v1/agents/{id}/directives?after=&wait_s=&instance=``: empty when none came within ``wait_s``."""

    directives: list[Directive]
    seq: int


class ControlAction(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    SYNC_NOW = "sync_now"
    DRAIN = "drain"
    SWAP = "swap"


class Action(StrEnum):
    SYNC = "sync"
    DEFER = "defer"


class Reason(StrEnum):
    """Why a decision was taken. Exported as a metric label; sentences are for logs."""

    SCORE_ABOVE_THRESHOLD = "score_above_threshold"
    SCORE_BELOW_THRESHOLD = "score_below_threshold"
    FIXED_H_REACHED = "fixed_h_reached"
    BELOW_FIXED_H = "below_fixed_h"
    PRESSURE_LOW = "pressure_low"
    PRESSURE_HIGH = "pressure_high"
    RANDOM_TIME_REACHED = "random_time_reached"
    BEFORE_RANDOM_TIME = "before_random_time"
    MAX_H_REACHED = "max_h_reached"
    BELOW_MIN_H = "below_min_h"
    MIN_GAP = "min_gap"
    BUDGET_EXHAUSTED = "budget_exhausted"
    BUDGET_DUE = "budget_due"
    """The remaining syncs of the budget would no longer fit before its horizon ends."""
    TOKENS_REACHED = "tokens_reached"
    TOKENS_BELOW_TARGET = "tokens_below_target"
    COST_LOW = "cost_low"
    """A sync costs now no more than what can still be expected of the chances before the deadline."""
    COST_HIGH = "cost_high"
    COST_SAME_CHOSEN = "cost_same_chosen"
    """Many moments cost the same as now, and this one was drawn."""
    COST_SAME_PASSED = "cost_same_passed"
    """Many moments cost the same as now, and another one will do as well."""
    LOWER_COST_AHEAD = "lower_cost_ahead"
    """The servers foresee a much lower cost before the deadline."""
    COST_UNKNOWN = "cost_unknown"
    COST_HISTORY_SHORT = "cost_history_short"
    """The cost has been watched for too short a time to say what is low."""
    NO_SYNC_POLICY = "no_sync_policy"
    AHEAD_OF_RATE = "ahead_of_rate"
    """The budget is a rate, and the syncs so far are all that the time until now pays for."""
    MAX_DEFER_REACHED = "max_defer_reached"
    """The budget's longest wait for a better moment is over."""
    NO_ISLANDS = "no_islands"
    SYNC_IN_FLIGHT = "sync_in_flight"
    JOIN_OPEN_ROUND = "join_open_round"
    """Islands began a round by themselves; the others come in at once, whatever gap, ``min_h`` or budget say: the round
    happens anyway, costs one sync, and would keep those who began it waiting."""
    ISLANDS_NOT_READY = "islands_not_ready"
    """Slots are still empty, or their islands have not reported progress yet."""
    PAUSED = "paused"
    MANUAL = "manual"
    """``POST /v1/control`` sync_now."""
    ROUND_DUE = "round_due"
    """The round that other islands are in has no time left to wait for a better moment of this one."""
    POLICY_FAILED = "policy_failed"
    """The policy raised; the safe answer is to defer until ``max_h``."""


class DecisionRecord(Wire):
    """One journalled decision."""

    id: int
    t_s: float
    policy: str
    action: Action
    reason: Reason
    round: int
    slots: tuple[int, ...]
    terms: dict[str, float]
    """Every term of the score or rule, by name."""
    slot: int | None = None
    """The island that it is about; None when it is about all of them together."""
    shadow: bool = False
    """Whether it was only noted down: the decision of a policy that runs beside the one in force."""


class DecisionPage(Wire):
    decisions: list[DecisionRecord]
    next_since: int
    """Pass as ``since`` to get what came later."""


class RoundRecord(Wire):
    """One outer round of the run."""

    round: int
    decision_id: int | None
    """None for a round that islands started by themselves."""
    policy: str
    reason: str
    directed_s: float | None
    started_s: float | None
    finished_s: float | None
    slots_applied: tuple[int, ...]
    slots_failed: tuple[int, ...]
    """Slots whose sync failed, and directed ones that never reported."""
    slots_late: tuple[int, ...] = ()
    """Slots that adopted the result although their contribution came too late for it."""
    slots_stale: tuple[int, ...] = ()
    """Of these, slots whose contribution was taken into a later round with less weight."""
    bytes_total: int
    closed: bool


class ServerStatus(Wire):
    server_id: str
    node: str
    sample: LoadSample
    """The newest one."""
    age_s: float
    known: bool
    """False when the sample is too old or says nothing: load unknown, counted as full."""


class IslandStatus(Wire):
    agent_id: str
    slot: int | None
    node: str
    server_id: str | None
    epoch: int
    alive: bool
    age_s: float
    """Seconds since the last heartbeat."""
    progress: Progress | None
    servers: tuple[str, ...] = ()
    """Servers that it competes with: the one it names, else all of its node. Empty: nobody says how loaded it is there,
    which counts as full."""
    drained: bool = False
    """It gets no slot until an operator resumes it."""
    leaving: ControlAction | None = None
    """`drain` or `swap`: it gives its slot up after its next sync."""


class Fleet(Wire):
    """``GET /v1/fleet``."""

    run_id: str
    t_s: float
    servers: list[ServerStatus]
    num_unknown: int
    islands: list[IslandStatus]
    paused: bool
    epoch: int
    rounds_closed: int


class PolicySpec(Order):
    """``GET/PUT /v1/policy``."""

    name: str
    params: dict[str, float | int] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and parameters in one word, such as ``fixed_h:h=256``."""
        return ":".join([self.name, *(f"{name}={_word(value)}" for name, value in self.params.items())])


def _word(value: float) -> str:
    """The shortest spelling that is this number and no other."""
    if isinstance(value, int):
        return str(value) if abs(value) < LONGEST_WHOLE else f"{'-' if value < 0 else ''}huge"
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


LONGEST_WHOLE = 10**18


class RoundPage(Wire):
    """``GET /v1/rounds``: the newest rounds, oldest first."""

    rounds: list[RoundRecord]


MAX_BUDGET_SYNCS = 10**9
MAX_BUDGET_S = 1e10
"""Three hundred years, which still can be added to Unix times without losing seconds."""


class BudgetSpec(Order):
    """``PUT /v1/budget``: how many outer syncs may be spent until the horizon ends; after it none is.

    With ``outer_syncs`` None the number is unlimited and only ``min_gap_s`` holds, or ``syncs_per_hour`` paces it.
    """

    outer_syncs: int | None = Field(default=None, ge=0, le=MAX_BUDGET_SYNCS)
    horizon_s: float | None = Field(default=None, gt=0, le=MAX_BUDGET_S)
    min_gap_s: float = Field(default=0.0, ge=0, le=MAX_BUDGET_S)
    syncs_per_hour: float | None = Field(default=None, gt=1e-6, le=1e6)
    """In place of a number and a horizon: after t hours rate * t syncs were made, give or take one."""
    max_defer_s: float | None = Field(default=None, gt=0, le=MAX_BUDGET_S)
    """Seconds since the last sync (at first since the budget was set) after which one is made whatever it costs."""

    @property
    def period_s(self) -> float | None:
        """Between two syncs of a rate; None where the budget is none."""
        return None if self.syncs_per_hour is None else 3600.0 / self.syncs_per_hour


class BudgetStatus(Wire):
    """``GET /v1/budget``."""

    spec: BudgetSpec
    started_s: float
    spent: int = Field(ge=0, lt=1 << 62)
    remaining: int | None = Field(ge=0, le=MAX_BUDGET_SYNCS)
    last_sync_s: float | None


class ControlWhen(StrEnum):
    """When an island gives its slot up."""

    AFTER_SYNC = "after_sync"
    """After its next outer sync: no inner step is lost."""
    NOW = "now"
    """At once: its steps since the last outer sync are lost."""


class ControlRequest(Order):
    """``POST /v1/control``. At most one of ``agent_id``, ``slot`` and ``node`` names whom it is about.

    `pause` and `sync_now` are about the whole run, `resume` about the whole run or about drained agents, `drain` and
    `swap` about the agents that are named.
    """

    action: ControlAction
    agent_id: Name | None = None
    slot: Slot | None = None
    node: Name | None = None
    """All agents of this host, as of now."""
    to_agent: Name | None = None
    """For `swap`: the spare that takes the slot; None takes the one that waits longest."""
    when: ControlWhen = ControlWhen.AFTER_SYNC
    """For `drain` and `swap`."""
    dry_run: bool = False
    """Answer what would happen, and change nothing."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if sum(target is not None for target in (self.agent_id, self.slot, self.node)) > 1:
            raise ValueError("agent_id, slot and node each name whom it is about: give one of them")
        return self


class ControlStep(Wire):
    """What an order does to one agent."""

    agent_id: str
    slot: int | None
    """The slot that changes hands; None for a spare."""
    change: ControlAction
    when: ControlWhen
    to_agent: str | None = None
    """The spare that takes the slot; None: the slot stays empty until there is one."""


class ControlReply(Wire):
    action: ControlAction
    effect: str
    dry_run: bool = False
    steps: tuple[ControlStep, ...] = ()
