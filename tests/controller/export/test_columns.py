"""The dictionary of columns holds for code and documentation alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from controller.export.columns import COLUMNS, Kind, Table, names_of
from controller.export.docs import with_columns
from controller.export.stream import Format, Request, open_export
from controller.journal_file import JournalReader
from tests.controller.export.journals import fill

DOCS = Path(__file__).parents[3] / "docs" / "exports.md"


def test_the_documentation_says_what_the_code_does() -> None:
    text = DOCS.read_text()
    assert text == with_columns(text), "run: python -m controller.export.docs docs/exports.md"


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="columns: begin"):
        with_columns("nothing here")


@pytest.mark.parametrize("table", Table)
def test_every_table_has_times_first_and_its_id_last(table: Table) -> None:
    names = names_of(table)
    assert (names[:2], names[-1]) == (("t", "t_s"), "id")
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("table", Table)
def test_every_column_is_one_sentence_with_a_unit_that_its_name_agrees_with(table: Table) -> None:
    for column in COLUMNS[table]:
        assert column.text.endswith("."), column
        assert "|" not in column.text, column
        if re.search(r"_s$", column.name):
            assert column.unit in {"s", "violations/s"}, column
        if column.name.endswith("_frac"):
            assert column.unit == "fraction", column
        if column.kind in {Kind.BOOLEAN, Kind.JSON}:
            assert column.unit == "", column


@pytest.mark.parametrize("table", Table)
def test_a_row_has_a_value_of_the_right_type_for_every_column(table: Table, tmp_path: Path) -> None:
    reader = JournalReader(fill(tmp_path / "j.sqlite", decisions=2, samples=2, rounds=2))
    export = open_export(reader, Request(table=table, format=Format.CSV), on_rows=lambda _: None)
    (page,) = export._pages()
    types: dict[Kind, tuple[type, ...]] = {
        Kind.INTEGER: (int,),
        Kind.NUMBER: (int, float),
        Kind.TIME: (int, float),
        Kind.TEXT: (str,),
        Kind.JSON: (str,),
        Kind.BOOLEAN: (bool,),
    }
    for row in page:
        for column, value in zip(COLUMNS[table], row, strict=True):
            assert value is None or isinstance(value, types[column.kind]), (column, value)
