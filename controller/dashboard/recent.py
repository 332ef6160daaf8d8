"""What the dashboard remembers of the last minutes, in memory alone: the journal has all of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from controller.dashboard.decision_log import DecisionLog
from controller.dashboard.history import LoadHistory
from controller.schema import Recovery, RecoveryRecord
from controller.state import FleetState

DECISIONS_AT_START = 1000
"""Eight minutes of them."""
RECOVERIES = 200


@dataclass(slots=True)
class Recent:
    """Fed by the controller and its loop as things happen."""

    history: LoadHistory = field(default_factory=LoadHistory)
    decisions: DecisionLog = field(default_factory=DecisionLog)
    recoveries: deque[Recovery] = field(default_factory=lambda: deque(maxlen=RECOVERIES))
    """Oldest first."""


def read_recent(state: FleetState) -> Recent:
    """At the start of a controller: the decisions and recoveries of the one before it."""
    reader = state.reader
    since = reader.before_newest("decisions", DECISIONS_AT_START)
    recent = Recent(decisions=DecisionLog(reader.decisions(since=since, limit=DECISIONS_AT_START)))
    since = reader.before_newest("recoveries", RECOVERIES)
    rows = reader.page("recoveries", since=since, limit=RECOVERIES)
    recent.recoveries.extend(row for row in rows if isinstance(row, RecoveryRecord))
    return recent
