"""A round that an island began by itself is joined by the others at once, and counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.schema import Phase
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress, report, until

SYNCING = progress(50, phase=Phase.SYNC)


async def join_fleet(client: Client, *, other: Any) -> None:
    """Island 0 is in a sync of its own, island 1 is not."""
    await client.register("island-0", "a")
    await client.register("island-1", "b")
    await client.beat("island-0", "a", epoch=2, progress=SYNCING)
    await client.beat("island-1", "b", epoch=2, progress=other)


async def sync_of(client: Client, agent_id: str, instance: str, **query: Any) -> list[dict[str, Any]]:
    found = (await client.directives(agent_id, instance, **query))["directives"]
    return [directive for directive in found if directive["kind"] == "sync"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_h": 80},
        {"min_gap_s": 1000.0},
        {"budget_syncs": 0},
        {"policy": "no_sync"},
        {"policy": "wa_diloco", "policy_params": {"threshold": 1e6}},
    ],
)
def test_the_others_join_an_open_round_whatever_would_defer_a_new_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    params = {"policy_params": {"h": 90}} if "policy" not in settings else {}

    async def body(client: Client) -> None:
        await join_fleet(client, other=progress(5))
        (directive,) = await sync_of(client, "island-1", "b", wait_s=10)
        assert (directive["round"], directive["quorum"], directive["reason"]) == (0, 2, "join_open_round")
        assert await sync_of(client, "island-0", "a") == []
        for agent_id, instance, autonomous in (("island-0", "a", True), ("island-1", "b", False)):
            await client.beat(
                agent_id, instance, epoch=2, progress=progress(0, round=1), syncs=[report(autonomous=autonomous)]
            )
        (round_,) = (await client.get("/v1/rounds"))["rounds"]
        assert (round_["closed"], round_["slots_applied"], round_["slots_failed"]) == (True, [0, 1], [])
        assert (await client.get("/v1/budget"))["spent"] == 1

    play(make_settings(tmp_path, num_slots=2, **settings, **params), ManualClock(), body)


def test_a_paused_fleet_does_not_join(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.http.post("/v1/control", json={"action": "pause"})
        await join_fleet(client, other=progress(5))

        async def decided() -> bool:
            found = (await client.get("/v1/decisions", limit=10_000))["decisions"]
            return bool(found) and found[-1]["reason"] == "paused" and found[-1]["slots"] == [0, 1]

        await until(decided, "a decision")
        assert await sync_of(client, "island-1", "b") == []

    play(make_settings(tmp_path, num_slots=2), ManualClock(), body)


def test_an_island_that_only_catches_up_is_left_to_it(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await join_fleet(client, other=progress(5, round=1))

        async def decided() -> bool:
            found = (await client.get("/v1/decisions", limit=10_000))["decisions"]
            return bool(found) and found[-1]["reason"] == "sync_in_flight" and found[-1]["slots"] == [0, 1]

        await until(decided, "a decision")
        assert await sync_of(client, "island-1", "b") == []

    play(make_settings(tmp_path, num_slots=2), ManualClock(), body)


def test_after_a_restart_of_the_controller_the_others_join_the_round_that_began_without_it(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, num_slots=2, budget_syncs=3)

    async def before(client: Client) -> None:
        await join_fleet(client, other=progress(5))
        await client.beat("island-0", "a", epoch=2, progress=progress(50))

    async def after(client: Client) -> None:
        await client.beat("island-0", "a", epoch=2, progress=SYNCING)
        await client.beat("island-1", "b", epoch=2, progress=progress(60))
        directives = await sync_of(client, "island-1", "b", wait_s=10)
        assert directives[-1]["round"] == 0
        finished: dict[str, Any] = {"started_s": START_S + 40, "pushed_s": None, "finished_s": START_S + 41}
        await client.beat("island-1", "b", epoch=2, progress=progress(0, step=1100, round=1))
        await client.beat("island-0", "a", epoch=2, syncs=[report(autonomous=True, **finished)])
        await client.beat("island-1", "b", epoch=2, syncs=[report(**finished)])
        assert (await client.get("/v1/budget"))["spent"] == 1
        assert (await client.get("/v1/rounds"))["rounds"][-1]["slots_applied"] == [0, 1]

    play(settings, clock, before)
    clock.advance(30)
    play(settings, clock, after)
