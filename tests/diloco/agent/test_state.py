"""What the agent knows of the sync that is under way."""

from __future__ import annotations

import pytest

from diloco.agent.config import IslandSettings
from diloco.agent.state import AgentState
from diloco.protocol import SyncCommand
from diloco.schema import SyncOutcome, SyncReport


@pytest.fixture
def state() -> AgentState:
    return AgentState(IslandSettings(slot=0, synchronizer="http://127.0.0.1:9600"))


def command(round_number: int) -> SyncCommand:
    return SyncCommand(round=round_number, epoch=0, deadline_s=1e9)


def report(round_number: int) -> SyncReport:
    return SyncReport(
        round=round_number,
        outcome=SyncOutcome.APPLIED,
        started_s=1.0,
        finished_s=2.0,
        bytes_pushed=1,
        bytes_pulled=1,
        inner_steps=1,
        tokens=1,
    )


def test_the_report_of_an_older_sync_leaves_the_newer_one_in_flight(state: AgentState) -> None:
    older = state.begin_sync(command(3))
    newer = state.begin_sync(command(4))
    assert older.serial != newer.serial
    state.take_report(report(3), serial=older.serial)
    assert state.sync_in_flight == newer
    state.take_report(report(4), serial=newer.serial)
    assert state.sync_in_flight is None
    assert [each.round for each in state.reports] == [3, 4]


def test_a_sync_that_was_refused_before_it_began_leaves_the_one_in_flight(state: AgentState) -> None:
    begun = state.begin_sync(command(3))
    state.fail_sync(command(4), "other fragments", now_s=5.0)
    assert state.sync_in_flight == begun
    state.fail_sync(begun, "the worker ended", now_s=5.0)
    assert state.sync_in_flight is None


def test_a_sync_that_was_skipped_is_no_longer_in_flight_and_has_no_report(state: AgentState) -> None:
    begun = state.begin_sync(command(3))
    state.end_sync(begun.serial)
    assert state.sync_in_flight is None
    assert not state.reports
