"""What the journal holds, whichever database keeps it: tables, the schema's versions, rows of its logs.

*State* tables have one row per key, the newest wins. *Logs* grow with time; each has a column ``t_s`` to prune by and
an ``id`` to page by. Statements with ``?`` are written so that SQLite and PostgreSQL take the same text.
"""

from __future__ import annotations

import json

from controller.schema import Action, DecisionRecord, Reason, Recovery, RecoveryRecord

SCHEMA_VERSION = 2
"""Two added the island and the shadow of a decision, recoveries, and the order of rounds."""

STATE_TABLES = ("meta", "agents", "servers", "rounds", "directives", "budget", "policy")

LOG_TABLES: dict[str, dict[str, str]] = {
    "samples": {"server_id": "text", "t_s": "float8", "body": "text"},
    "decisions": {
        "id": "int8",
        "t_s": "float8",
        "policy": "text",
        "action": "text",
        "reason": "text",
        "round": "int8",
        "slots": "text",
        "terms": "text",
        "slot": "int8",
        "shadow": "bool",
    },
    "recoveries": {"t_s": "float8", "slot": "int8", "agent_id": "text", "kind": "text", "body": "text"},
}
"""Columns that a row of each log brings, in its order, with PostgreSQL's types. Where ``id`` is not among them the
database numbers the rows."""

ROUND_NUMBER = "CAST(key AS BIGINT)"
"""The number of a round, of which the key is the text; the index on it knows this very expression."""

Row = tuple[object, ...]


def decision_row(decision: DecisionRecord) -> Row:
    return (
        decision.id,
        decision.t_s,
        decision.policy,
        decision.action.value,
        decision.reason.value,
        decision.round,
        json.dumps(decision.slots),
        json.dumps(decision.terms),
        decision.slot,
        decision.shadow,
    )


def recovery_row(recovery: Recovery) -> Row:
    return recovery.t_s, recovery.slot, recovery.agent_id or "", recovery.kind.value, recovery.model_dump_json()


def to_decision(row: Row) -> DecisionRecord:
    number, t_s, policy, action, reason, round_, slots, terms, slot, shadow = row
    return DecisionRecord.model_validate(
        {
            "id": number,
            "t_s": t_s,
            "policy": policy,
            "action": Action(str(action)),
            "reason": Reason(str(reason)),
            "round": round_,
            "slots": tuple(json.loads(str(slots))),
            "terms": json.loads(str(terms)),
            "slot": slot,
            "shadow": bool(shadow),
        }
    )


def to_recovery(row: Row) -> RecoveryRecord:
    number, body = row
    return RecoveryRecord.model_validate(json.loads(str(body)) | {"id": number})


def oldest_rows(table: str) -> str:
    """The numbers of at most so many rows of a log that are older than a time; the newest of all is none of them."""
    return f"SELECT id FROM {table} WHERE t_s < ? AND id < (SELECT max(id) FROM {table}) ORDER BY t_s LIMIT ?"  # noqa: S608
