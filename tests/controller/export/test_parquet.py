"""Parquet files with types, row groups of bounded size, and nulls for what is unknown."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controller.export import stream
from controller.export.columns import COLUMNS, Table
from controller.export.stream import Format, Request, open_export
from controller.journal_file import JournalReader
from tests.controller.export.journals import fill

pa = pytest.importorskip("pyarrow", reason="the extra `export` is not installed")
pq = pytest.importorskip("pyarrow.parquet")


def parquet(path: Path, table: Table, **fields: int) -> bytes:
    request = Request(table=table, format=Format.PARQUET, **fields)
    return b"".join(open_export(JournalReader(path), request, on_rows=lambda _: None).pieces())


@pytest.mark.parametrize("table", Table)
def test_every_table_reads_back_with_its_columns_types_and_meanings(table: Table, tmp_path: Path) -> None:
    raw = parquet(fill(tmp_path / "j.sqlite", decisions=3, samples=3, rounds=3), table)
    read = pq.read_table(io.BytesIO(raw))
    assert read.schema.names == [column.name for column in COLUMNS[table]]
    assert read.num_rows in {1, 3}
    assert read.schema.field("t").type == pa.timestamp("ms", tz="UTC")
    assert read.schema.field("id").type == pa.int64()
    for column in COLUMNS[table]:
        metadata = read.schema.field(column.name).metadata
        assert (metadata[b"unit"].decode(), metadata[b"description"].decode()) == (column.unit, column.text)


def test_values_are_those_of_the_csv(tmp_path: Path) -> None:
    (row,) = pq.read_table(io.BytesIO(parquet(fill(tmp_path / "j.sqlite"), Table.RECOVERIES))).to_pylist()
    assert row["t"] == datetime.fromtimestamp(row["t_s"], UTC)
    assert (row["slot"], row["down_s"], row["from_agent"]) == (1, 24.5, "=x")


def test_unknown_is_null(tmp_path: Path) -> None:
    (row,) = pq.read_table(io.BytesIO(parquet(fill(tmp_path / "j.sqlite", samples=1), Table.SAMPLES))).to_pylist()
    assert (row["running"], row["waiting"], row["trainer_phase"]) == (1.0, None, None)


def test_a_row_group_holds_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PAGE_ROWS", 10)
    file = pq.ParquetFile(io.BytesIO(parquet(fill(tmp_path / "j.sqlite", decisions=25), Table.DECISIONS)))
    assert [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)] == [10, 10, 5]


def test_a_file_without_rows_is_a_file(tmp_path: Path) -> None:
    read = pq.read_table(io.BytesIO(parquet(fill(tmp_path / "j.sqlite"), Table.DECISIONS)))
    assert (read.num_rows, read.num_columns) == (0, len(COLUMNS[Table.DECISIONS]))
