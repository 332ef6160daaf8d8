"""What the journal keeps besides the wire models: agents with their leases, and rounds with what each slot reported."""

from __future__ import annotations

from enum import StrEnum

from controller.schema import BudgetSpec, ControlAction, PolicySpec, RoundRecord
from diloco.recovery_schema import ReplicaNotice
from diloco.schema import Progress, SyncOutcome, SyncReport
from service.wire import Wire


class Membership(StrEnum):
    ACTIVE = "active"
    """Holds a lease."""
    LOST = "lost"
    """Missed its lease; its slot is kept for it for a while."""
    LEFT = "left"
    GONE = "gone"
    """Its process is known to have ended without a word: nothing is kept for it."""


class Leaving(Wire):
    """An order that waits for the agent's next outer sync, or for its state to be handed over."""

    action: ControlAction
    """`drain` or `swap`."""
    to_agent: str | None = None
    """The spare that is to take the slot; None leaves it to the one that waits longest."""
    deadline_s: float | None = None
    """The agent was told to hand its state over, and has until then; None: not yet."""


class AgentRecord(Wire):
    """One agent. Identity is ``agent_id``; ``instance`` is the process that speaks for it."""

    agent_id: str
    instance: str
    node: str
    server_id: str | None
    url: str | None
    num_parameters: int | None
    membership: Membership
    slot: int | None
    """Slot that it holds, or that is kept for it while it is lost."""
    last_slot: int | None
    """Slot that it had last: it gets it back if nobody else has it."""
    granted_epoch: int
    """Epoch of its present membership: a heartbeat with an older one comes from before it."""
    registered_s: float
    last_beat_s: float
    progress: Progress | None = None
    """What the process said last under this lease."""
    progress_told_s: float | None = None
    resume: Progress | None = None
    """How far its slot had come when this process took it."""
    resume_told_s: float | None = None
    progress_current: bool = False
    """False when a sync ended since the last progress: steps since sync are not known until the next."""
    drained: bool = False
    """It gets no slot until an operator resumes it."""
    leaving: Leaving | None = None
    keeps_replicas: bool = False
    hands_over: bool = False
    replicas: tuple[ReplicaNotice, ...] = ()
    """What it said last that it keeps of other slots."""

    @property
    def active(self) -> bool:
        return self.membership is Membership.ACTIVE


class SlotReport(Wire):
    """What one slot said about one round."""

    slot: int
    report: SyncReport


class RoundEntry(Wire):
    """One outer round: directed by a decision, or found out because islands report one that they began themselves."""

    id: int
    """Running number: a failed round is tried again under the same ``round``."""
    round: int
    decision_id: int | None
    policy: str
    reason: str
    directed_s: float | None
    opened_s: float
    deadline_s: float
    """When the controller stops waiting for reports."""
    expected: tuple[int, ...]
    """Slots whose reports close it."""
    directed: tuple[int, ...] | None = None
    """Of these, slots that have been told to come; None: all."""
    quorum: int | None = None
    """Contributions that it must have; None: all of the expected slots."""
    reports: tuple[SlotReport, ...] = ()
    closed_s: float | None = None
    spent: bool = False
    """Whether its outer step was counted."""

    def slots(self, outcome: SyncOutcome) -> tuple[int, ...]:
        return tuple(sorted({entry.slot for entry in self.reports if entry.report.outcome is outcome}))

    @property
    def reported(self) -> frozenset[int]:
        return frozenset(entry.slot for entry in self.reports)

    @property
    def applied(self) -> frozenset[tuple[int, int]]:
        """Slot and round of the contributions that were applied."""
        return frozenset((e.slot, e.report.round) for e in self.reports if e.report.outcome is SyncOutcome.APPLIED)

    @property
    def missing(self) -> tuple[int, ...]:
        reported = self.reported
        return tuple(slot for slot in self.expected if slot not in reported)

    @property
    def told(self) -> frozenset[int]:
        """Slots that have been told to come."""
        return frozenset(self.expected if self.directed is None else self.directed)

    @property
    def began_s(self) -> float:
        """When it was directed, or when islands began it by themselves (by their clocks, never later than known)."""
        if self.directed_s is not None:
            return self.directed_s
        return min([self.opened_s, *(entry.report.started_s for entry in self.reports)])

    @property
    def next_version(self) -> int:
        """Version of the global parameters that its reports prove."""
        adopted = [e.report.round + 1 for e in self.reports if e.report.outcome is not SyncOutcome.FAILED]
        return max(adopted, default=0)

    def to_record(self) -> RoundRecord:
        reports = [entry.report for entry in self.reports]
        closed = self.closed_s is not None
        return RoundRecord(
            round=self.round,
            decision_id=self.decision_id,
            policy=self.policy,
            reason=self.reason,
            directed_s=self.directed_s,
            started_s=min((report.started_s for report in reports), default=None),
            finished_s=max((report.finished_s for report in reports), default=None),
            slots_applied=self.slots(SyncOutcome.APPLIED),
            slots_failed=tuple(sorted({*self.slots(SyncOutcome.FAILED), *(self.missing if closed else ())})),
            slots_late=tuple(sorted({*self.slots(SyncOutcome.LATE), *self.slots(SyncOutcome.STALE)})),
            slots_stale=self.slots(SyncOutcome.STALE),
            bytes_total=sum(report.bytes_pushed + report.bytes_pulled for report in reports),
            closed=closed,
        )


class Configured(Wire):
    """Policy and budget as the settings of the last start had them, to see whether an operator changed them since."""

    policy: PolicySpec
    budget: BudgetSpec
