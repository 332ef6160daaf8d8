"""Rows of the journal as rows of the exported tables."""

from __future__ import annotations

import json
from collections.abc import Mapping

from controller.export.columns import COLUMNS, DECISION_TERMS, RECOVERY_PHASES, Table
from controller.journal_reader import PageRow, SampleRow
from controller.records import RoundEntry
from controller.rounds import outcome_of
from controller.schema import DecisionRecord, RecoveryRecord
from sidecar.schema import LoadSample

Value = str | int | float | bool | None


def to_row(table: Table, record: PageRow) -> tuple[Value, ...]:
    """The values in the order of `COLUMNS`."""
    match record:
        case DecisionRecord():
            found = _decision(record)
        case SampleRow():
            found = _sample(record.id, record.sample)
        case RoundEntry():
            found = _round(record)
        case RecoveryRecord():
            found = _recovery(record)
    return tuple(found[column.name] for column in COLUMNS[table])


def _decision(record: DecisionRecord) -> dict[str, Value]:
    return _times(record.t_s) | {
        "policy": record.policy,
        "action": record.action.value,
        "reason": record.reason.value,
        "round": record.round,
        "slot": record.slot,
        "shadow": record.shadow,
        "num_slots": len(record.slots),
        "slots": _json(record.slots),
        **{column.name: record.terms.get(column.name) for column in DECISION_TERMS},
        "terms": _json(record.terms),
        "id": record.id,
    }


def _sample(number: int, sample: LoadSample) -> dict[str, Value]:
    judged, missed = sample.slo_requests, sample.slo_violations
    ahead = sample.sync_costs_ahead
    plain = {
        column.name: getattr(sample, column.name)
        for column in COLUMNS[Table.SAMPLES]
        if column.name in LoadSample.model_fields
    }
    return _times(sample.t_s) | {
        **plain,
        "state": sample.state.value,
        "slo_attained": None if judged is None or missed is None else judged - missed,
        "sync_cost_now": ahead[0].violations if ahead and ahead[0].start_s == 0 else None,
        "id": number,
    }


def _round(entry: RoundEntry) -> dict[str, Value]:
    record = entry.to_record()
    reports = [told.report for told in entry.reports]
    pushes = [report.pushed_s - report.started_s for report in reports if report.pushed_s is not None]
    return _times(entry.began_s) | {
        "round": entry.round,
        "outcome": outcome_of(entry).value,
        "policy": entry.policy,
        "reason": entry.reason,
        "decision_id": entry.decision_id,
        "counted": entry.spent,
        "directed_s": entry.directed_s,
        "started_s": record.started_s,
        "finished_s": record.finished_s,
        "closed_s": entry.closed_s,
        "duration_s": _span(record.started_s, record.finished_s),
        "open_s": _span(entry.opened_s, entry.closed_s),
        "push_max_s": max(pushes, default=None),
        "bytes_pushed": sum(report.bytes_pushed for report in reports),
        "bytes_pulled": sum(report.bytes_pulled for report in reports),
        "tokens": sum(report.tokens for report in reports),
        "inner_steps_max": max((report.inner_steps for report in reports), default=None),
        "num_expected": len(entry.expected),
        "num_applied": len(record.slots_applied),
        "num_late": len(record.slots_late),
        "num_failed": len(record.slots_failed),
        "slots_expected": _json(entry.expected),
        "slots_applied": _json(record.slots_applied),
        "slots_late": _json(record.slots_late),
        "slots_stale": _json(record.slots_stale),
        "staleness_max": max((report.staleness for report in reports if report.staleness), default=None),
        "slots_failed": _json(record.slots_failed),
        "id": entry.id,
    }


def _recovery(record: RecoveryRecord) -> dict[str, Value]:
    return _times(record.t_s) | {
        "kind": record.kind.value,
        "slot": record.slot,
        "agent_id": record.agent_id,
        "from_agent": record.from_agent,
        "epoch": record.epoch,
        "recovery": record.recovery,
        "lost_s": record.lost_s,
        "taken_s": record.taken_s,
        "first_step_s": record.first_step_s,
        "handover_s": _span(record.lost_s, record.taken_s),
        "down_s": _span(record.lost_s, record.first_step_s),
        "detected_s": record.detected_s,
        "fetched_s": record.fetched_s,
        "loaded_s": record.loaded_s,
        **{
            f"{name}_s": _span(getattr(record, begin), getattr(record, end)) if record.rung is not None else None
            for name, begin, end in RECOVERY_PHASES
            if name != "first_step"
        },
        "rung": None if record.rung is None else record.rung.value,
        "generation": record.generation,
        "step": record.step,
        "steps_lost": record.steps_lost,
        "detail": record.detail or None,
        "id": record.id,
    }


def _times(t_s: float) -> dict[str, Value]:
    """The same moment twice: ``t`` becomes a date when it is written."""
    return {"t": t_s, "t_s": t_s}


def _span(from_s: float | None, to_s: float | None) -> float | None:
    return None if from_s is None or to_s is None else to_s - from_s


def _json(value: Mapping[str, float] | tuple[int, ...]) -> str:
    return json.dumps(value, separators=(",", ":"))
