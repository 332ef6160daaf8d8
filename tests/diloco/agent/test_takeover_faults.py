"""Whatever else fails while a slot changes hands: training goes on, or one sentence says what was lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.schema import RecoveryKind
from diloco.schema import Phase, Rung
from tests.diloco.agent.conftest import IslandService
from tests.diloco.agent.test_takeover import FleetUnderTest, Run, kill_island

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LEASE = ("--lease-timeout-s", "5")


def stop(service: IslandService) -> None:
    os.kill(service.process.pid, signal.SIGSTOP)


def go_on(service: IslandService) -> None:
    os.kill(service.process.pid, signal.SIGCONT)


def until_held(island: IslandService) -> int:
    """The step at which its worker waits for the slot to be handed over."""
    return island.until_progress(lambda p: p.phase is Phase.PAUSED).step


@pytest.fixture
def fleet(serve: Callable[..., str], run_service: Run, run_island: Run, tmp_path: Path) -> FleetUnderTest:
    return FleetUnderTest(run_service, run_island, serve(tmp_path / "sync", quorum=1), tmp_path, *LEASE)


def test_two_failures_at_once_cost_what_is_said(fleet: FleetUnderTest) -> None:
    first = fleet.start("first")
    first.until_progress(lambda p: p.step > 3)
    buddy = fleet.start("buddy")
    fleet.until_parked(buddy)
    fleet.until_replicated(buddy, beyond=5)
    third = fleet.start("third")
    fleet.until_parked(third)
    buddy.process.send_signal(signal.SIGKILL)
    kill_island(first)
    buddy.finish()
    again = fleet.trains_again()
    assert again.agent_id == "third"
    # What had been sent to the third since the buddy died, if anything, else the global parameters: and it says which.
    if again.rung is Rung.GLOBAL:
        assert "inner steps since the last sync" in again.detail
        assert again.steps_lost
    else:
        assert again.rung is Rung.REPLICA
    third.until_progress(lambda p: p.step > (again.step or 0) + 10)


def test_an_island_whose_buddy_dies_trains_on_and_gets_another(fleet: FleetUnderTest) -> None:
    first = fleet.start("first")
    first.until_progress(lambda p: p.step > 3)
    buddy = fleet.start("buddy")
    fleet.until_replicated(buddy, beyond=5)
    buddy.kill()
    third = fleet.start("third")
    fleet.until_replicated(third, beyond=first.progress().step)
    assert first.status().restarts == 0
    assert fleet.recoveries(RecoveryKind.SPARE_TOOK_SLOT) == []


def test_a_spare_that_dies_in_a_swap_leaves_the_slot_where_it_is(fleet: FleetUnderTest) -> None:
    first = fleet.start("first")
    first.until_progress(lambda p: p.step > 3)
    spare = fleet.start("spare")
    fleet.until_replicated(spare, beyond=5)
    stop(spare)
    fleet.order("swap", slot=0, to_agent="spare", when="now")
    held = until_held(first)
    spare.process.send_signal(signal.SIGKILL)
    spare.finish()
    first.until_progress(lambda p: p.step > held + 20)
    assert first.status().slot == 0
    assert fleet.recoveries(RecoveryKind.SWAPPED) == []
    assert "swap cancelled, no spare waits" in fleet.controller.log()


def test_a_swap_outlives_a_controller_that_is_killed_in_it(
    serve: Callable[..., str], run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    synchronizer = serve(tmp_path / "sync", quorum=1)
    fleet = FleetUnderTest(run_service, run_island, synchronizer, tmp_path)
    first = fleet.start("first")
    first.until_progress(lambda p: p.step > 3)
    spare = fleet.start("spare")
    fleet.until_replicated(spare, beyond=5)
    stop(spare)
    fleet.order("swap", slot=0, to_agent="spare", when="now")
    held = until_held(first)
    port = fleet.controller.url.rpartition(":")[2]
    fleet.controller.kill()
    fleet = FleetUnderTest(run_service, run_island, synchronizer, tmp_path, "--port", port)
    go_on(spare)
    again = fleet.trains_again()
    assert (again.agent_id, again.rung, again.steps_lost) == ("spare", Rung.REPLICA, 0), again.detail
    assert again.step == held
    spare.until_progress(lambda p: p.step > held + 10)


def test_a_takeover_waits_for_a_synchronizer_that_is_away_and_loses_nothing(
    spawn: Callable[..., Any], run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    synchronizer = spawn(tmp_path / "sync", "--quorum", "1")
    fleet = FleetUnderTest(run_service, run_island, synchronizer.url, tmp_path)
    first = fleet.start("first")
    first.until_progress(lambda p: p.step > 3)
    spare = fleet.start("spare")
    fleet.until_parked(spare)
    replicated = fleet.until_replicated(spare, beyond=10)
    synchronizer.kill()
    kill_island(first)
    spare.until_status(lambda s: s.slot == 0 and s.worker_pid is not None)
    synchronizer.start()
    again = fleet.trains_again()
    assert again.rung is Rung.REPLICA, again.detail
    assert (again.step or 0) >= replicated
    spare.until_progress(lambda p: p.step > (again.step or 0) + 10)
