"""What is read back from a journal that somebody edited, or that a disk has damaged, is an error and no traceback."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from controller.app import build_controller_app
from controller.config import ControllerSettings
from controller.journal_file import JournalReader
from service.errors import ConfigError
from service.settings import load_settings
from tests.controller.conftest import FilePlace
from tests.controller.helpers import ManualClock, make_settings, play

NUMBERS = (
    "run_started_s",
    "recovery_number",
    "epoch",
    "rounds_applied",
    "rounds_counted_to",
    "directive_seq",
    "num_fragments",
)


@pytest.fixture
def journal(tmp_path: Path) -> FilePlace:
    async def nothing(_: object) -> None:
        return

    play(make_settings(tmp_path), ManualClock(), nothing)
    return FilePlace(tmp_path / "journal.sqlite")


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("text", ["", "many", "nan", "1e999", "9" * 5000])
def test_a_number_that_is_none_is_told_by_its_name(journal: FilePlace, key: str, text: str) -> None:
    journal.execute(f"INSERT OR REPLACE INTO meta VALUES ('{key}', '{text}')")  # noqa: S608
    with pytest.raises(ConfigError, match=rf"table meta \({key}\) has a row") as caught:
        build_controller_app(make_settings(journal.path.parent), clock=ManualClock())
    assert caught.value.remedy is not None


@pytest.mark.parametrize("table", ["agents", "rounds", "directives", "servers"])
def test_a_row_that_is_none_is_told_by_its_table(journal: FilePlace, table: str) -> None:
    journal.execute(f"INSERT INTO {table} VALUES ('1', '[]')")  # noqa: S608
    with pytest.raises(ConfigError, match=f"table {table} has a row"):
        build_controller_app(make_settings(journal.path.parent), clock=ManualClock())


@pytest.mark.parametrize("body", ["null", "[]", "7", "{", "[" * 100_000])
def test_a_log_with_such_a_row_is_unreadable_and_no_traceback(journal: FilePlace, body: str) -> None:
    with contextlib.closing(sqlite3.connect(journal.path)) as connection, connection:
        connection.execute(
            "INSERT INTO decisions (id, t_s, policy, action, reason, round, slots, terms)"
            " VALUES (1, 1, 'fixed_h', 'defer', 'min_h', 1, ?, ?)",
            (body, body),
        )
        connection.execute(
            "INSERT INTO recoveries (t_s, slot, agent_id, kind, body) VALUES (1, 1, 'a', 'left', ?)", (body,)
        )
        connection.execute("INSERT INTO samples (server_id, t_s, body) VALUES ('a', 1, ?)", (body,))
    reader = JournalReader(journal.path)
    for table in ("decisions", "recoveries", "samples"):
        with pytest.raises(ConfigError, match=f"table {table} has a row"):
            reader.page(table, since=0, limit=10)


@pytest.mark.parametrize("given", ["", "/", "."])
def test_a_journal_without_a_name_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="names no file") as caught:
        load_settings(ControllerSettings, ["--journal", given])
    assert caught.value.field == "journal"
