"""Decisions that say the same are one row; everything else begins a new one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from controller.dashboard.decision_log import MAX_ROWS, DecisionLog
from controller.schema import DecisionRecord


def decision(number: int, reason: str = "below_min_h", **fields: Any) -> DecisionRecord:
    base = {"id": number, "t_s": float(number), "policy": "fixed_h", "action": "defer", "reason": reason, "round": 0}
    return DecisionRecord.model_validate({**base, "slots": (0,), "terms": {"h": float(number)}, **fields})


def test_a_run_of_equal_decisions_is_one_row_with_the_terms_of_the_last() -> None:
    (row,) = DecisionLog([decision(1), decision(2), decision(3)]).newest(10)
    assert (row.first_id, row.last_id, row.count, row.first_s, row.last_s) == (1, 3, 3, 1.0, 3.0)
    assert row.terms == {"h": 3.0}


@pytest.mark.parametrize(
    "changed", [{"reason": "paused"}, {"action": "sync"}, {"round": 1}, {"policy": "wa_diloco"}, {"shadow": True}]
)
def test_whatever_changes_begins_a_new_row(changed: dict[str, Any]) -> None:
    rows = DecisionLog([decision(1), decision(2, **changed)]).newest(10)
    assert [(row.first_id, row.count) for row in rows] == [(1, 1), (2, 1)]


def test_decisions_about_other_islands_and_of_a_shadow_policy_do_not_end_a_run() -> None:
    numbers = itertools.count(1)
    log = DecisionLog()
    for _ in range(5):
        for slot, shadow in ((0, False), (1, False), (None, True)):
            log.add(decision(next(numbers), slot=slot, shadow=shadow))
    assert [(row.slot, row.shadow, row.count) for row in log.newest(10)] == [
        (0, False, 5),
        (1, False, 5),
        (None, True, 5),
    ]


def test_the_row_whose_decision_is_newest_comes_last_and_old_rows_are_forgotten() -> None:
    log = DecisionLog(decision(number, round=number) for number in range(MAX_ROWS + 5))
    rows = log.newest(10 * MAX_ROWS)
    assert len(rows) == MAX_ROWS
    assert (rows[0].first_id, rows[-1].first_id) == (5, MAX_ROWS + 4)
    assert [row.first_id for row in log.newest(2)] == [MAX_ROWS + 3, MAX_ROWS + 4]
