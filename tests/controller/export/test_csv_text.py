"""CSV that spreadsheets and parsers read back as it was, and that runs nothing."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.export.columns import Table, names_of
from controller.export.csv_text import FORMULA_STARTS, csv_header, csv_rows, guard_formula, iso_time
from controller.export.rows import to_row
from controller.schema import RecoveryRecord
from tests.controller.export.journals import recovery


def rows_of(*records: RecoveryRecord) -> bytes:
    return csv_rows(Table.RECOVERIES, [to_row(Table.RECOVERIES, record) for record in records])


def parse(raw: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(raw.decode(), newline="")))


def test_a_header_and_one_line_per_row_end_in_crlf() -> None:
    raw = csv_header(Table.RECOVERIES) + rows_of(recovery(1), recovery(2))
    lines = raw.split(b"\r\n")
    assert (len(lines), lines[-1]) == (4, b"")
    assert lines[0].decode().split(",") == list(names_of(Table.RECOVERIES))
    first, second = parse(raw)
    assert (first["t"], first["t_s"]) == ("2023-11-14T22:13:44.500Z", "1700000024.5")
    assert (first["down_s"], first["handover_s"], second["id"]) == ("24.5", "20.0", "2")


def test_unknown_is_empty_and_zero_is_zero() -> None:
    unknown = recovery(1).model_copy(update={"lost_s": None, "slot": 0, "agent_id": None})
    (row,) = parse(csv_header(Table.RECOVERIES) + rows_of(unknown))
    assert (row["lost_s"], row["handover_s"], row["agent_id"], row["slot"]) == ("", "", "", "0")


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_a_text_that_a_spreadsheet_would_run_is_made_a_text(start: str) -> None:
    assert guard_formula(f"{start}cmd|' /C calc'!A0") == f"'{start}cmd|' /C calc'!A0"


def test_formulas_are_guarded_in_texts_and_numbers_stay_negative() -> None:
    behind = recovery(1).model_copy(update={"first_step_s": 1_699_999_999.0})
    (row,) = parse(csv_header(Table.RECOVERIES) + rows_of(behind))
    assert row["from_agent"] == "'=x"
    assert float(row["down_s"]) == -1.0


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_comes_back_as_it_was_behind_at_most_an_apostrophe(text: str) -> None:
    record = recovery(1).model_copy(update={"from_agent": text})
    (row,) = parse(csv_header(Table.RECOVERIES) + rows_of(record))
    assert row["from_agent"] in {text, f"'{text}"}
    assert not row["from_agent"].startswith(FORMULA_STARTS)


def test_times_that_no_calendar_has_are_unknown() -> None:
    assert [iso_time(t_s) for t_s in (-1.0, 1e18, 0.0)] == ["", "", "1970-01-01T00:00:00.000Z"]
