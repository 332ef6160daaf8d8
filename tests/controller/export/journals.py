"""A journal with rows of every table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller.journal import Journal
from controller.journal_tables import decision_row, recovery_row
from controller.records import RoundEntry, SlotReport
from controller.schema import Action, DecisionRecord, Reason, RecoveryKind, RecoveryRecord
from sidecar.schema import LoadSample
from tests.controller.helpers import START_S, report, sample


def decision(number: int, *, policy: str = "wa_diloco", **terms: float) -> DecisionRecord:
    return DecisionRecord(
        id=number,
        t_s=START_S + number / 2,
        policy=policy,
        action=Action.DEFER,
        reason=Reason.MIN_GAP,
        round=3,
        slots=(0, 1),
        terms={"h": 12.0, "pressure": 0.25, **terms},
    )


def load(number: int, **fields: Any) -> LoadSample:
    return LoadSample.model_validate(sample(t_s=START_S + number, **fields))


def round_entry(number: int, *, closed: bool = True) -> RoundEntry:
    return RoundEntry(
        id=number,
        round=number - 1,
        decision_id=number,
        policy="fixed_h",
        reason="fixed_h_reached",
        directed_s=START_S - 1,
        opened_s=START_S - 1,
        deadline_s=START_S + 60,
        expected=(0, 1),
        reports=(SlotReport(slot=0, report=report(number - 1)),),
        closed_s=START_S + 3 if closed else None,
        spent=closed,
    )


def recovery(number: int = 1) -> RecoveryRecord:
    return RecoveryRecord(
        id=number,
        t_s=START_S + 24.5,
        kind=RecoveryKind.TRAINS_AGAIN,
        slot=1,
        agent_id="spare",
        from_agent="=x",
        epoch=7,
        recovery=1,
        lost_s=START_S,
        taken_s=START_S + 20,
        first_step_s=START_S + 24.5,
    )


def fill(path: Path, *, decisions: int = 0, samples: int = 0, rounds: int = 0, open_round: int | None = None) -> Path:
    """A closed journal; the round ``open_round`` still waits for reports."""
    journal = Journal(path)
    for number in range(1, decisions + 1):
        journal.append("decisions", decision_row(decision(number)))
    for number in range(1, samples + 1):
        one = load(number, running=number)
        journal.append("samples", (one.server_id, one.t_s, one.model_dump_json(exclude_none=True)))
    for number in range(1, rounds + 1):
        journal.put("rounds", number, round_entry(number, closed=number != open_round))
    journal.append("recoveries", recovery_row(recovery(1)))
    journal.close()
    return path
