"""What the dashboard remembers of the last minutes, in memory alone: the journal has all of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.dashboard.decision_log import DecisionLog
from controller.dashboard.history import LoadHistory
from controller.dashboard.recovery_log import RecoveryLog
from controller.state import FleetState

DECISIONS_AT_START = 1000
"""Eight minutes of them."""


@dataclass(slots=True)
class Recent:
    """Fed by the controller and its loop as things happen."""

    history: LoadHistory = field(default_factory=LoadHistory)
    decisions: DecisionLog = field(default_factory=DecisionLog)
    recoveries: RecoveryLog = field(default_factory=RecoveryLog)


def read_recent(state: FleetState) -> Recent:
    """At the start of a controller: the decisions of the one before it."""
    since = max(0, state.last_decision_id - DECISIONS_AT_START)
    return Recent(decisions=DecisionLog(state.reader.decisions(since=since, limit=DECISIONS_AT_START)))
