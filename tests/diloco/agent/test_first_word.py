"""Who begins a run, and when: without a controller's word not at once, and never after it."""

from __future__ import annotations

import asyncio

import pytest

from controller.schema import AgentLease
from diloco.agent.config import IslandSettings
from diloco.agent.first_word import goes_on_alone
from diloco.agent.state import AgentState
from tests.diloco.agent.test_rules import lease

NEVER_S = 1e9


def asked(
    *, has_begun: bool = False, wait_s: float = NEVER_S, word: AgentLease | None = None, ends: bool = False
) -> bool:
    """What becomes of an island, where this happens at its second look at the synchronizer."""
    state = AgentState(IslandSettings(slot=0, synchronizer="http://127.0.0.1:9600"))
    exit_event = asyncio.Event()
    looks = 0

    async def look() -> bool:
        nonlocal looks
        looks += 1
        if looks < 2:
            return False
        state.limits_lease = word
        if ends:
            exit_event.set()
        return has_begun

    return asyncio.run(goes_on_alone(state, look, exit_event, wait_s=wait_s))


@pytest.mark.timeout(30)
def test_an_island_waits_for_a_run_a_word_the_end_of_its_patience_or_its_own() -> None:
    assert asked(has_begun=True)
    assert asked(wait_s=0.0)
    assert not asked(word=lease())
    assert not asked(word=lease(), has_begun=True)
    assert not asked(ends=True)
