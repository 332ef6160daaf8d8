"""Exports go on where they stopped, hold one page in memory, and leave nothing out."""

from __future__ import annotations

import csv
import io
import sqlite3
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from controller.export import stream
from controller.export.columns import Table
from controller.export.stream import Format, Request, open_export
from controller.journal_file import JournalReader
from controller.journal_reader import PageRow, SampleRow
from service.errors import ConfigError, UnavailableError
from tests.controller.export.journals import fill, load


def read(reader: stream.Reader, **fields: object) -> tuple[list[dict[str, str]], int]:
    request = Request(**{"table": Table.DECISIONS, "format": Format.CSV, **fields})  # type: ignore[arg-type]
    export = open_export(reader, request, on_rows=lambda _: None)
    text = b"".join(export.pieces()).decode()
    return list(csv.DictReader(io.StringIO(text, newline=""))), export.next_since


def test_pages_and_limits_meet_without_gap_or_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PAGE_ROWS", 7)
    reader = JournalReader(fill(tmp_path / "j.sqlite", decisions=50))
    seen: list[int] = []
    since = 0
    while True:
        rows, since_then = read(reader, since=since, limit=16)
        seen += [int(row["id"]) for row in rows]
        assert since_then == max([since, *(int(row["id"]) for row in rows)])
        if since_then == since:
            break
        since = since_then
    assert seen == list(range(1, 51))


def test_the_columns_of_a_decision_are_its_terms(tmp_path: Path) -> None:
    rows, _ = read(JournalReader(fill(tmp_path / "j.sqlite", decisions=1)))
    (row,) = rows
    assert (row["h"], row["pressure"], row["score"], row["slot"], row["shadow"]) == ("12.0", "0.25", "", "", "false")
    assert (row["slots"], row["terms"]) == ("[0,1]", '{"h":12.0,"pressure":0.25}')


def test_rounds_end_before_the_first_that_is_still_open(tmp_path: Path) -> None:
    path = fill(tmp_path / "j.sqlite", rounds=6, open_round=4)
    rows, next_since = read(JournalReader(path), table=Table.ROUNDS)
    assert ([row["id"] for row in rows], next_since) == (["1", "2", "3"], 3)
    fill(path, rounds=6)
    rows, next_since = read(JournalReader(path), table=Table.ROUNDS, since=next_since)
    assert ([row["id"] for row in rows], next_since) == (["4", "5", "6"], 6)
    (row, *_) = rows
    assert (row["outcome"], row["num_applied"], row["num_failed"], row["slots_failed"]) == ("partial", "1", "1", "[1]")
    assert (row["duration_s"], row["push_max_s"], row["bytes_pushed"], row["counted"]) == ("2.0", "1.0", "100", "true")


def test_a_limit_within_the_closed_rounds_is_kept(tmp_path: Path) -> None:
    rows, next_since = read(JournalReader(fill(tmp_path / "j.sqlite", rounds=6)), table=Table.ROUNDS, limit=2)
    assert ([row["id"] for row in rows], next_since) == (["1", "2"], 2)


def test_samples_have_latencies_attainment_cost_and_phase() -> None:
    full = load(
        1,
        ttft_mean_s=0.1,
        slo_requests=10,
        slo_violations=2,
        slo_violations_upper=3,
        sync_cost_per_s=0.5,
        trainer_phase="sync",
        sync_costs_ahead=[{"start_s": 0.0, "violations": 1.5}],
    )

    class One:
        def page(self, table: str, *, since: int, limit: int) -> Sequence[PageRow]:
            return [SampleRow(id=1, sample=full)] if since < 1 else []

        def last_of_page(self, table: str, *, since: int, limit: int) -> int:
            return 1

    rows, _ = read(One(), table=Table.SAMPLES)
    (row,) = rows
    assert (row["ttft_mean_s"], row["itl_mean_s"], row["trainer_phase"]) == ("0.1", "", "sync")
    assert (row["slo_attained"], row["slo_violations_upper"]) == ("8.0", "3.0")
    assert (row["sync_cost_per_s"], row["sync_cost_now"]) == ("0.5", "1.5")


def test_a_row_that_this_version_cannot_read_is_told(tmp_path: Path) -> None:
    path = fill(tmp_path / "j.sqlite", samples=2)
    with sqlite3.connect(path) as journal:
        journal.execute("UPDATE samples SET body = ? WHERE id = 2", ('{"t_s": 1}',))
    journal.close()
    with pytest.raises(ConfigError, match="table samples has a row that this version cannot read"):
        read(JournalReader(path), table=Table.SAMPLES)


def test_rows_that_are_dropped_meanwhile_end_the_export() -> None:
    class Gone:
        def page(self, table: str, *, since: int, limit: int) -> Sequence[PageRow]:
            return []

        def last_of_page(self, table: str, *, since: int, limit: int) -> int:
            return 9

    assert read(Gone()) == ([], 9)


def test_many_rows_need_the_memory_of_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.export.stream.PAGE_ROWS", 500)
    sample, num_rows = load(1, running=3), 1_000_000

    class Long:
        """Makes rows as they are asked for; the test reads the last tenth of them."""

        def page(self, table: str, *, since: int, limit: int) -> Sequence[PageRow]:
            return [SampleRow.model_construct(id=since + number, sample=sample) for number in range(1, limit + 1)]

        def last_of_page(self, table: str, *, since: int, limit: int) -> int:
            return num_rows

    request = Request(table=Table.SAMPLES, format=Format.CSV, since=num_rows - 100_000)
    pieces = open_export(Long(), request, on_rows=lambda _: None).pieces()
    next(pieces), next(pieces)
    tracemalloc.start()
    try:
        total = sum(len(piece) for piece in pieces)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total > 5_000_000
    assert peak < total / 2  # all of them together would be over the whole


def test_a_journal_that_cannot_be_read_is_told_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be read"):
        read(JournalReader(tmp_path / "missing.sqlite"))


def test_ids_rise_over_all_tables(tmp_path: Path) -> None:
    reader = JournalReader(fill(tmp_path / "j.sqlite", decisions=30, samples=30, rounds=30))
    for table in Table:
        rows, _ = read(reader, table=table)
        assert rows
        assert all(int(a["id"]) < int(b["id"]) for a, b in pairwise(rows))
