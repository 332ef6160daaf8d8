"""Rows of the journal as rows of the exported tables. A row that this version cannot read is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from controller.export.columns import COLUMNS, DECISION_TERMS, Table
from controller.records import RoundEntry
from controller.rounds import outcome_of
from controller.schema import RecoveryRecord
from sidecar.schema import LoadSample

Value = str | int | float | bool | None
Source = Mapping[str, object]
"""A row of the journal, by column."""


def to_row(table: Table, source: Source) -> tuple[Value, ...] | None:
    """The values in the order of `COLUMNS`; None for a row that this version cannot read."""
    try:
        found = READERS[table](source)
    except (ValidationError, ValueError, KeyError, TypeError):
        return None
    return tuple(found[column.name] for column in COLUMNS[table])


def is_open(table: Table, source: Source) -> bool:
    """Whether the row will still change: a round that is not closed yet."""
    if table is not Table.ROUNDS:
        return False
    try:
        return json.loads(str(source["body"])).get("closed_s") is None
    except (ValueError, AttributeError):
        return False


def _decision(source: Source) -> dict[str, Value]:
    terms, slots = json.loads(str(source["terms"])), json.loads(str(source["slots"]))
    slot, shadow = source.get("slot"), source.get("shadow")
    return _times(_number(source["t_s"])) | {
        "policy": str(source["policy"]),
        "action": str(source["action"]),
        "reason": str(source["reason"]),
        "round": _integer(source["round"]),
        "slot": None if slot is None else _integer(slot),
        "shadow": bool(shadow),
        "num_slots": len(slots),
        "slots": _json(slots),
        **{column.name: _term(terms, column.name) for column in DECISION_TERMS},
        "terms": _json(terms),
        "id": _integer(source["id"]),
    }


def _term(terms: Mapping[str, object], name: str) -> float | None:
    return _number(terms[name]) if terms.get(name) is not None else None


def _sample(source: Source) -> dict[str, Value]:
    sample = LoadSample.model_validate_json(str(source["body"]))
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
        "id": _integer(source["id"]),
    }


def _round(source: Source) -> dict[str, Value]:
    entry = RoundEntry.model_validate_json(str(source["body"]))
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
        "slots_failed": _json(record.slots_failed),
        "id": _integer(source["id"]),
    }


def _recovery(source: Source) -> dict[str, Value]:
    record = RecoveryRecord.model_validate_json(str(source["body"]))
    return _times(record.t_s) | {
        "kind": record.kind.value,
        "slot": record.slot,
        "agent_id": record.agent_id,
        "from_agent": record.from_agent,
        "epoch": record.epoch,
        "began_id": record.began_id,
        "lost_s": record.lost_s,
        "taken_s": record.taken_s,
        "first_step_s": record.first_step_s,
        "handover_s": _span(record.lost_s, record.taken_s),
        "down_s": _span(record.lost_s, record.first_step_s),
        "id": record.id,
    }


READERS: dict[Table, Callable[[Source], dict[str, Value]]] = {
    Table.DECISIONS: _decision,
    Table.SAMPLES: _sample,
    Table.ROUNDS: _round,
    Table.RECOVERIES: _recovery,
}


def _times(t_s: float) -> dict[str, Value]:
    """The same moment twice: ``t`` becomes a date when it is written."""
    return {"t": t_s, "t_s": t_s}


def _span(from_s: float | None, to_s: float | None) -> float | None:
    return None if from_s is None or to_s is None else to_s - from_s


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"{value!r} is no number")


def _integer(value: object) -> int:
    if isinstance(value, int):
        return value
    raise TypeError(f"{value!r} is no integer")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
