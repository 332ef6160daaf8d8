"""Policies in shadow that decide for each island: rounds, marks and budget of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.budget import new_period, view_budget
from controller.config import ControllerSettings
from controller.policy.base import FleetView, IslandView
from controller.schema import Action, BudgetSpec, DecisionRecord
from controller.shadow import Mark, Odometer
from controller.shadow_book import JOURNAL_EVERY_S
from controller.shadow_rounds import IslandsRun, islands_view, with_island_sync, with_round_over
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress, sample
from tests.controller.test_islands_mode import beat

ISLANDS = 3


def fleet(**fields: Any) -> FleetView:
    islands = tuple(
        IslandView(slot=slot, node=f"host-{slot}", server_id=None, ready=True, inner_steps_since_sync=5)
        for slot in range(ISLANDS)
    )
    budget = view_budget(new_period(BudgetSpec(), now_s=START_S))
    base: dict[str, Any] = {"islands": islands, "servers": (), "budget": budget, "min_h": 2, "max_h": 100}
    return FleetView(**{**base, "run_started_s": START_S, "round": 7, "expected_sync_s": 2.0, **fields})


def odometer(step: int, since_sync: int = 5) -> Odometer:
    then = step - since_sync
    return Odometer(
        now=Mark(step=step, tokens=step * 10, loss=2.0), at_sync=Mark(step=then, tokens=then * 10, loss=3.0)
    )


def seen_at(step: int) -> dict[int, Odometer]:
    return {slot: odometer(step) for slot in range(ISLANDS)}


def fresh_run(spec: BudgetSpec | None = None) -> IslandsRun:
    return IslandsRun(budget=new_period(spec or BudgetSpec(), now_s=START_S), marks={}, first_round=7)


def come(run: IslandsRun, slot: int, step: int, now_s: float) -> IslandsRun:
    seen = odometer(step)
    view = islands_view(fleet(), run, seen_at(step), now_s)
    return with_island_sync(run, view, slot, seen, now_s=now_s, join_s=30.0)


def test_the_first_island_opens_a_round_that_costs_one_sync_and_the_others_join_it() -> None:
    run = come(fresh_run(BudgetSpec(outer_syncs=3)), 1, 500, START_S)
    assert run.open is not None
    assert (run.open.round, run.open.due_s, run.open.told) == (7, START_S + 30, frozenset({1}))
    assert (run.num_syncs, run.budget.spent) == (1, 1)
    run = come(run, 0, 510, START_S + 10)
    assert run.open is not None
    assert (run.open.told, run.num_syncs, run.budget.spent) == (frozenset({0, 1}), 1, 1)
    view = islands_view(fleet(), run, seen_at(520), START_S + 11)
    assert [island.inner_steps_since_sync for island in view.islands] == [10, 20, 5]
    assert [island.syncing for island in view.islands] == [True, False, False]
    assert (view.round, view.sync_in_flight) == (7, True)


def test_a_round_is_over_when_all_who_are_there_have_come_and_are_through() -> None:
    run = come(come(fresh_run(), 0, 500, START_S), 1, 500, START_S + 1)
    assert with_round_over(run, {0, 1, 2}, START_S + 100).open is not None
    assert with_round_over(run, {0, 1}, START_S + 2.5).open is not None
    over = with_round_over(run, {0, 1}, START_S + 3)
    assert over.open is None
    assert islands_view(fleet(), over, seen_at(501), START_S + 3).round == 8


# From here on in a controller.


def settings_of(directory: Path, shadows: str, **values: Any) -> ControllerSettings:
    base: dict[str, Any] = {"mode": "per_island", "num_slots": ISLANDS, "policy": "no_sync", "tick_s": 10.0}
    base |= {"shadow_policies": shadows, "lease_timeout_s": 20.0, "sync_timeout_s": 120.0, "stale_after_s": 300.0}
    return make_settings(directory, **{**base, **values})


async def join(client: Client) -> None:
    for slot in range(ISLANDS):
        await client.register(f"island-{slot}", server_id=f"s{slot}", node=f"host-{slot}")


async def second(client: Client, clock: ManualClock, step: int, pressures: list[float], **told: Any) -> None:
    """A second goes by in which all islands make a step."""
    clock.advance(1.0)
    batch = [
        sample(f"s{slot}", node=f"host-{slot}", t_s=clock(), pressure_frac=value, **told)
        for slot, value in enumerate(pressures)
    ]
    assert (await client.http.post("/v1/samples", json={"samples": batch})).json()["accepted"] == ISLANDS
    for slot in range(ISLANDS):
        await beat(client, f"island-{slot}", progress=progress(step, step=1000 + step))
    await client.loop.tick()


async def shadow_syncs(client: Client) -> list[DecisionRecord]:
    await client.controller.state.journal.commit()
    page = await client.get("/v1/decisions", limit=10_000)
    found = [DecisionRecord.model_validate(body) for body in page["decisions"]]
    return [record for record in found if record.shadow and record.action is Action.SYNC]


def test_each_island_comes_when_its_own_server_lets_it_or_when_the_round_is_due(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join(client)
        for step in range(1, 70):
            # The server of island 1 is free from second 10 on, that of 2 never; that of 0 always is.
            await second(client, clock, step, [0.1, 0.1 if step >= 10 else 0.9, 0.9])
        syncs = (await shadow_syncs(client))[:3]
        assert [(one.slot, one.slots, one.round) for one in syncs] == [(0, (0,), 0), (1, (1,), 0), (2, (2,), 0)]
        first_s = syncs[0].t_s
        due_s = client.controller.state.settings.sync_times.join_s
        came_s = [one.t_s - first_s for one in syncs]
        assert came_s[:2] == [0.0, 8.0]
        # In time for the round, whatever its server says.
        assert due_s - 20 <= came_s[2] <= due_s
        assert [one.reason for one in syncs] == ["pressure_low", "pressure_low", "round_due"]
        (status,) = (await client.get("/v1/shadow"))["policies"]
        assert status["island_syncs"] == len(await shadow_syncs(client)) >= ISLANDS
        assert (await client.get("/v1/rounds"))["rounds"] == []
        assert (await client.get("/v1/budget"))["spent"] == 0

    play(settings_of(tmp_path, "pressure_gate:threshold=0.5"), clock, body)


def test_a_shadow_of_many_islands_spends_one_sync_a_round_and_keeps_the_gap(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join(client)
        for step in range(1, 80):
            await second(client, clock, step, [0.1] * ISLANDS)
        (status,) = (await client.get("/v1/shadow"))["policies"]
        assert (status["syncs"], status["island_syncs"], status["budget_remaining"]) == (2, 2 * ISLANDS, 0)
        times_s = sorted({one.t_s for one in await shadow_syncs(client)})
        assert [round(later - times_s[0]) for later in times_s] == [0, 20]

    play(settings_of(tmp_path, "fixed_h:h=4", budget_syncs=2, min_gap_s=20.0), clock, body)


def test_the_journal_is_not_flooded_by_islands_that_wait(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join(client)
        for step in range(1, 61):
            await second(client, clock, step, [0.9, 0.9, 0.9])
        page = await client.get("/v1/decisions", limit=10_000)
        waits = [one for one in page["decisions"] if one["shadow"] and one["action"] == "defer"]
        assert 1 <= len(waits) <= 60 / JOURNAL_EVERY_S + 1
        counted = await client.metric(
            "wadiloco_controller_shadow_decisions_total"
            '{action="defer",policy="pressure_gate:threshold=0.5",reason="pressure_high"}'
        )
        assert counted is not None
        assert counted > ISLANDS * 50

    play(settings_of(tmp_path, "pressure_gate:threshold=0.5"), clock, body)


@pytest.mark.parametrize("mode", ["synchronous", "per_island"])
def test_headroom_says_whether_it_judged_islands_or_the_fleet(tmp_path: Path, mode: str) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join(client)
        for step in range(1, 420):
            cost = 1.0 if step // 30 % 2 else 0.0
            await second(client, clock, step, [0.1] * ISLANDS, interval_s=1.0, sync_cost_per_s=cost)
        told = await client.get("/v1/headroom", window_s=400)
        assert told["islands"] == (ISLANDS if mode == "per_island" else None)
        assert told["verdict"] == "enough"
        shadow = next(one for one in told["policies"] if one["shadow"])
        assert shadow["syncs"] == (ISLANDS if mode == "per_island" else 1) * told["syncs"]
        assert shadow["cost"] is not None

    settings = settings_of(tmp_path, "fixed_h:h=100", mode=mode, budget_syncs=4, budget_horizon_s=440.0, max_h=1000)
    play(settings, clock, body)
