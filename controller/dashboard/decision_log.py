"""The newest decisions, those that say the same in a row told as one (pure).

A controller decides twice a second and mostly says the same again: what a reader wants to see is when it changed. A row
goes on while policy, action, reason and round stay the same for its slot; another slot's decisions do not end it.
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.dashboard.schema import DecisionRow
from controller.schema import DecisionRecord

MAX_ROWS = 2000
"""An open row for each of 1,000 islands, and as much history."""

Line = tuple[str, int | None, bool]
"""Policy, slot and shadow: one line of decisions."""


class DecisionLog:
    """Rows by the id of their first decision."""

    def __init__(self, records: Iterable[DecisionRecord] = ()) -> None:
        self._rows: dict[int, DecisionRow] = {}
        self._open: dict[Line, int] = {}
        for record in records:
            self.add(record)

    def add(self, record: DecisionRecord) -> None:
        line = (record.policy, record.slot, record.shadow)
        row = self._rows.get(self._open.get(line, -1))
        if row is None or not _goes_on(row, record):
            row = _begin(record)
            self._open[line] = row.first_id
        else:
            row = row.model_copy(
                update={
                    "last_id": record.id,
                    "last_s": record.t_s,
                    "count": row.count + 1,
                    "terms": record.terms,
                }
            )
        # Taken out and put back: the order of the dictionary is that of the last decision.
        self._rows.pop(row.first_id, None)
        self._rows[row.first_id] = row
        if len(self._rows) > MAX_ROWS:
            self._rows.pop(next(iter(self._rows)))

    def newest(self, limit: int) -> list[DecisionRow]:
        """The rows whose last decision is newest, oldest first."""
        return list(self._rows.values())[-limit:]


def _goes_on(row: DecisionRow, record: DecisionRecord) -> bool:
    return (row.action, row.reason, row.round) == (record.action, record.reason, record.round)


def _begin(record: DecisionRecord) -> DecisionRow:
    return DecisionRow(
        first_id=record.id,
        last_id=record.id,
        first_s=record.t_s,
        last_s=record.t_s,
        count=1,
        policy=record.policy,
        action=record.action,
        reason=record.reason,
        round=record.round,
        slot=record.slot,
        shadow=record.shadow,
        terms=record.terms,
    )
