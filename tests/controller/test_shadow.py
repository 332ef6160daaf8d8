"""Policies in shadow: their own past, their own budget, and no harm."""

from __future__ import annotations

import itertools
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.budget import new_period, view_budget
from controller.policy.base import Decision, FleetView, IslandView
from controller.schema import Action, BudgetSpec, DecisionRecord, PolicySpec, Reason
from controller.shadow import Mark, Odometer, VirtualRun, follow_budget, shadow_view, with_sync
from controller.shadow_book import JOURNAL_EVERY_S, REST_S
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress

VIEW = FleetView(
    islands=(
        IslandView(slot=0, node="host-a", server_id=None, ready=False),
        IslandView(slot=1, node="host-b", server_id=None, ready=True, inner_steps_since_sync=3),
    ),
    servers=(),
    budget=view_budget(new_period(BudgetSpec(), now_s=START_S)),
    min_h=2,
    max_h=100,
    run_started_s=START_S,
    round=7,
    sync_in_flight=True,
    round_to_join=True,
    retry_at_s=START_S + 100,
)


def odometer(step: int, since_sync: int, loss: float = 2.0) -> Odometer:
    return Odometer(
        now=Mark(step=step, tokens=step * 10, loss=loss),
        at_sync=Mark(step=step - since_sync, tokens=(step - since_sync) * 10, loss=loss + 1),
    )


def fresh_run(spec: BudgetSpec | None = None) -> VirtualRun:
    return VirtualRun(budget=new_period(spec or BudgetSpec(), now_s=START_S), marks={}, first_round=7)


def test_policies_whose_parameters_differ_in_the_last_digit_are_two(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        order = [{"name": "random_deferral", "params": {"seed": seed}} for seed in (1_000_001, 1_000_002)]
        answer = await client.http.put("/v1/shadow", json={"policies": order})
        assert [told["policy"] for told in answer.json()["policies"]] == [
            "random_deferral:seed=1000001",
            "random_deferral:seed=1000002",
        ]
        huge = {"policies": [{"name": "fixed_h", "params": {"h": 10**400}}]}
        refused = await client.http.put("/v1/shadow", json=huge)
        assert (refused.status_code, refused.json()["error"]) == (422, "InputError")

    play(make_settings(tmp_path), ManualClock(), body)


def test_before_its_first_sync_it_counts_steps_from_the_islands_own() -> None:
    seen = shadow_view(VIEW, fresh_run(), {0: odometer(500, 40), 1: odometer(600, 3)}, START_S)
    assert [island.inner_steps_since_sync for island in seen.islands] == [40, 3]
    assert [island.tokens_since_sync for island in seen.islands] == [400, 30]
    assert [island.loss_at_sync for island in seen.islands] == [3.0, 3.0]
    assert all(island.ready for island in seen.islands)
    assert (seen.sync_in_flight, seen.round_to_join, seen.retry_at_s, seen.round) == (False, False, None, 7)


def test_after_a_virtual_sync_it_counts_from_there_whatever_the_real_run_does() -> None:
    run = with_sync(fresh_run(BudgetSpec(outer_syncs=3)), {0: odometer(500, 40, loss=1.5)}, now_s=START_S, sync_s=2)
    during = shadow_view(VIEW, run, {0: odometer(501, 41)}, START_S + 1)
    assert during.sync_in_flight
    later = shadow_view(VIEW, run, {0: odometer(530, 5), 1: odometer(9, 4)}, START_S + 2)
    assert not later.sync_in_flight
    assert [island.inner_steps_since_sync for island in later.islands] == [30, 4]
    assert later.islands[0].loss_at_sync == 1.5
    assert later.round == 8
    assert (later.budget.spent, later.budget.remaining, later.budget.last_sync_s) == (1, 2, START_S)


def test_an_island_that_fell_back_has_no_negative_steps() -> None:
    run = with_sync(fresh_run(), {0: odometer(500, 40)}, now_s=START_S, sync_s=0)
    assert shadow_view(VIEW, run, {0: odometer(450, 0)}, START_S).islands[0].inner_steps_since_sync == 0


def test_an_island_without_progress_stays_as_it_is() -> None:
    assert shadow_view(VIEW, fresh_run(), {}, START_S).islands == VIEW.islands


def test_a_new_period_of_the_real_budget_is_a_new_one_of_its_own_and_its_gap_holds() -> None:
    spec = BudgetSpec(outer_syncs=2, horizon_s=100, min_gap_s=10)
    run = with_sync(fresh_run(spec), {}, now_s=START_S + 5, sync_s=1)
    same = new_period(spec, now_s=START_S).model_copy(update={"spent": 2, "remaining": 0})
    assert follow_budget(run, same) is run
    renewed = follow_budget(run, new_period(spec, now_s=START_S + 50, last_sync_s=START_S + 1)).budget
    assert (renewed.started_s, renewed.spent, renewed.remaining) == (START_S + 50, 0, 2)
    assert renewed.last_sync_s == START_S + 5


@dataclass(frozen=True)
class Raising:
    name: str = "raising"
    syncs: bool = True

    def decide(self, view: FleetView, now_s: float) -> Decision:
        raise RuntimeError("no")


@dataclass(frozen=True)
class Infinite:
    name: str = "infinite"
    syncs: bool = True

    def decide(self, view: FleetView, now_s: float) -> Decision:
        return Decision(action=Action.DEFER, reason=Reason.MIN_GAP, terms={"x": float("inf")})


async def decisions(client: Client, *, shadow: bool) -> list[DecisionRecord]:
    page = await client.get("/v1/decisions", limit=10_000)
    found = [DecisionRecord.model_validate(body) for body in page["decisions"]]
    return [record for record in found if record.shadow is shadow]


async def tick(client: Client, clock: ManualClock, step: int, h: int, *, seconds: float = 1.0, **fields: Any) -> None:
    """A second goes by in which the island trains."""
    clock.advance(seconds)
    await client.beat(epoch=1, progress=progress(h, step=step, **fields))
    await client.loop.tick()


def test_a_shadow_syncs_by_its_own_count_and_directs_nobody(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, tick_s=4, policy="no_sync", shadow_policies="fixed_h:h=10,fixed_h:h=25")

    async def body(client: Client) -> None:
        await client.register()
        for second in range(60):
            await tick(client, clock, 1000 + second, second)
        shadows = {one["policy"]: one for one in (await client.get("/v1/shadow"))["policies"]}
        # Steps 10, 20, ... 50 of 59; the two seconds of a sync cost none, since the island trains on.
        assert (shadows["fixed_h:h=10"]["syncs"], shadows["fixed_h:h=25"]["syncs"]) == (5, 2)
        synced = [record for record in await decisions(client, shadow=True) if record.action is Action.SYNC]
        assert [record.policy for record in synced].count("fixed_h:h=10") == 5
        assert {record.reason for record in synced} == {Reason.FIXED_H_REACHED}
        assert synced[0].terms["h"] == 10
        assert (await client.get("/v1/rounds"))["rounds"] == []
        assert (await client.directives())["directives"] == []
        assert (await client.get("/v1/budget"))["spent"] == 0
        assert {record.policy for record in await decisions(client, shadow=False)} == {"no_sync"}

    play(settings, clock, body)


def test_a_shadow_keeps_its_own_budget_and_gap(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(
        tmp_path, tick_s=4, policy="no_sync", shadow_policies="fixed_h:h=2", budget_syncs=3, min_gap_s=15
    )

    async def body(client: Client) -> None:
        await client.register()
        for second in range(90):
            await tick(client, clock, 1000 + second, second)
        (shadow,) = (await client.get("/v1/shadow"))["policies"]
        assert (shadow["syncs"], shadow["budget_remaining"], shadow["reason"]) == (3, 0, "budget_exhausted")
        times_s = [r.t_s for r in await decisions(client, shadow=True) if r.action is Action.SYNC]
        assert [round(later - earlier) for earlier, later in itertools.pairwise(times_s)] == [15, 15]
        assert (await client.get("/v1/budget"))["remaining"] == 3

    play(settings, clock, body)


def test_the_journal_holds_syncs_and_changes_and_is_not_flooded(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, tick_s=4, policy="no_sync", shadow_policies="pressure_gate")

    async def body(client: Client) -> None:
        await client.register(server_id="vllm-0")
        for second in range(50):
            # H stays under min_h on every other tick, so that the reason changes each second.
            await tick(client, clock, 1000 + second, second % 2 * 5)
        found = await decisions(client, shadow=True)
        assert 4 <= len(found) <= 50 / JOURNAL_EVERY_S + 1
        assert {record.reason for record in found} <= {
            Reason.NO_ISLANDS,
            Reason.ISLANDS_NOT_READY,
            Reason.PRESSURE_HIGH,
            Reason.BELOW_MIN_H,
        }
        counted = [
            await client.metric(
                f'wadiloco_controller_shadow_decisions_total{{action="defer",policy="pressure_gate",reason="{reason}"}}'
            )
            for reason in ("pressure_high", "below_min_h")
        ]
        assert sum(value or 0 for value in counted) >= 50

    play(settings, clock, body)


@pytest.mark.parametrize("broken", [Raising(), Infinite()])
def test_one_that_fails_rests_is_counted_and_harms_nobody(tmp_path: Path, broken: Raising | Infinite) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, tick_s=4, shadow_policies="fixed_h:h=5,no_sync", lease_timeout_s=200)

    async def body(client: Client) -> None:
        await client.register()
        client.controller.lab.shadows.shadows[0].policy = broken
        for second in range(10):
            await tick(client, clock, 1000 + second, second)
        name = 'wadiloco_controller_shadow_failures_total{policy="fixed_h:h=5"}'
        assert await client.metric(name) == 1
        status = (await client.get("/v1/shadow"))["policies"]
        assert (status[0]["failures"], status[0]["resting_until_s"]) == (1, START_S + 1 + REST_S)
        assert status[1]["reason"] == "no_sync_policy"
        await tick(client, clock, 1010, 10)
        assert len((await client.get("/v1/rounds"))["rounds"]) == 1
        await tick(client, clock, 1011, 11, seconds=REST_S)
        assert await client.metric(name) == 2
        assert await client.metric("wadiloco_controller_tick_failures_total") == 0

    play(settings, clock, body)


def test_shadows_are_set_over_http_survive_a_restart_and_give_way_to_new_settings(tmp_path: Path) -> None:
    clock = ManualClock()

    async def change(client: Client) -> None:
        order = {"policies": [{"name": "fixed_h", "params": {"h": 20}}]}
        answer = await client.http.put("/v1/shadow", json=order)
        assert (answer.status_code, answer.json()["policies"][0]["policy"]) == (200, "fixed_h:h=20")

    async def kept(client: Client) -> None:
        assert [one["policy"] for one in (await client.get("/v1/shadow"))["policies"]] == ["fixed_h:h=20"]

    async def replaced(client: Client) -> None:
        assert [one["policy"] for one in (await client.get("/v1/shadow"))["policies"]] == ["no_sync"]

    play(make_settings(tmp_path), clock, change)
    play(make_settings(tmp_path), clock, kept)
    play(make_settings(tmp_path, shadow_policies="no_sync"), clock, replaced)


def test_impossible_shadows_are_refused_by_field(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        refusals: list[tuple[list[dict[str, Any]], str]] = [
            ([{"name": "dance"}], "policies.0.name"),
            ([{"name": "no_sync"}, {"name": "fixed_h", "params": {"h": 1000}}], "policies.1.params.h"),
            ([{"name": "no_sync"}, {"name": "no_sync"}], "policies"),
        ]
        for policies, field in refusals:
            refused = await client.http.put("/v1/shadow", json={"policies": policies})
            assert (refused.status_code, refused.json()["field"]) == (422, field)
            assert refused.json()["remedy"]
        assert (await client.get("/v1/shadow"))["policies"] == []

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize("text", ["dance", "fixed_h:h", "fixed_h:h=x", "no_sync,no_sync", "fixed_h:h=1000"])
def test_settings_refuse_impossible_shadows(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="shadow_policies"):
        make_settings(tmp_path, shadow_policies=text)


def test_a_spec_that_went_through_the_journal_is_the_same() -> None:
    spec = PolicySpec(name="fixed_h", params={"h": 20, "x": 0.5})
    assert PolicySpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.label == "fixed_h:h=20:x=0.5"


def test_a_journal_from_before_shadows_is_taken_over(tmp_path: Path) -> None:
    clock = ManualClock()

    async def before(client: Client) -> None:
        await client.register()
        await tick(client, clock, 1000, 1)
        assert await decisions(client, shadow=False)

    async def after(client: Client) -> None:
        await client.register()
        await tick(client, clock, 1001, 2)
        assert len(await decisions(client, shadow=False)) >= 2
        assert len(await decisions(client, shadow=True)) >= 1

    play(make_settings(tmp_path, tick_s=4), clock, before)
    later = make_settings(tmp_path, tick_s=4, shadow_policies="no_sync")
    with sqlite3.connect(str(later.journal)) as journal:
        for column in ("slot", "shadow"):
            journal.execute(f"ALTER TABLE decisions DROP COLUMN {column}")
    journal.close()
    play(later, clock, after)
