"""Every outer step costs one sync, whether or not its islands live to report it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.controller.helpers import EPOCH_0, START_S, Client, ManualClock, make_settings, play, progress, report, until


def test_steps_that_nobody_reported_are_spent_and_end_the_budget(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(10))

        async def directed() -> bool:
            return bool((await client.get("/v1/rounds"))["rounds"])

        await until(directed, "a round")
        # Contributed, applied, killed: the next process of the slot finds the version and knows of no report.
        left = await client.http.delete("/v1/agents/island-0", params={"instance": "first"})
        assert left.status_code == 204
        assert (await client.get("/v1/budget"))["spent"] == 0
        lease = await client.register(instance="second")
        await client.beat(instance="second", epoch=lease.epoch - EPOCH_0, progress=progress(0, round=1))
        assert (await client.get("/v1/budget"))["spent"] == 1
        await client.beat(instance="second", epoch=lease.epoch - EPOCH_0, progress=progress(50, step=1050, round=2))
        budget = await client.get("/v1/budget")
        assert (budget["spent"], budget["remaining"]) == (2, 0)
        late = [report(round_, started_s=START_S + round_) for round_ in (0, 1)]
        await client.beat(instance="second", epoch=lease.epoch - EPOCH_0, syncs=late)
        rounds = (await client.get("/v1/rounds"))["rounds"]
        assert [(r["round"], r["reason"], r["slots_applied"]) for r in rounds] == [
            (0, "fixed_h_reached", [0]),
            (1, "unreported", [0]),
        ]
        assert (await client.get("/v1/budget"))["spent"] == 2
        assert (await client.get("/v1/fleet"))["rounds_closed"] == 2

    play(make_settings(tmp_path, budget_syncs=2), ManualClock(), body)


def test_steps_from_before_the_period_are_not_charged_to_it(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress())
        clock.advance(5)
        await client.http.put("/v1/budget", json={"outer_syncs": 3})
        await client.beat(epoch=1, progress=progress(round=2, last_sync_at_s=START_S + 4))
        assert (await client.get("/v1/budget"))["spent"] == 0
        await client.beat(epoch=1, progress=progress(round=3, last_sync_at_s=START_S + 6))
        assert (await client.get("/v1/budget"))["spent"] == 1

    play(make_settings(tmp_path), clock, body)


def test_what_was_spent_while_the_controller_was_away_is_counted_when_it_is_back(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, budget_syncs=5)

    async def before(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(round=1))

    async def after(client: Client) -> None:
        await client.beat(epoch=1, progress=progress(step=2000, round=3))
        assert (await client.get("/v1/budget"))["spent"] == 2

    play(settings, clock, before)
    clock.advance(60)
    play(settings, clock, after)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"outer_syncs": 1' + "0" * 400 + "}", "body.outer_syncs"),
        ('{"outer_syncs": 1' + "0" * 400 + ', "horizon_s": 100}', "body.outer_syncs"),
        ('{"outer_syncs": 2, "horizon_s": 1e300}', "body.horizon_s"),
        ('{"min_gap_s": 1e300}', "body.min_gap_s"),
    ],
)
def test_an_impossible_budget_is_refused_by_field(tmp_path: Path, body: str, field: str) -> None:
    async def run(client: Client) -> None:
        answer = await client.http.put("/v1/budget", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert (await client.http.get("/metrics")).status_code == 200

    play(make_settings(tmp_path), ManualClock(), run)


@pytest.mark.parametrize("policy", ["random_deferral", "wa_diloco", "fixed_h"])
def test_the_largest_budget_is_decided_on_in_no_time(tmp_path: Path, policy: str) -> None:
    async def run(client: Client) -> None:
        answer = await client.http.put("/v1/budget", json={"outer_syncs": 10**9, "horizon_s": 1e10, "min_gap_s": 1})
        assert answer.status_code == 200
        await client.register()
        await client.beat(epoch=1, progress=progress(5))

        async def decided() -> bool:
            return bool((await client.get("/v1/decisions", limit=1000))["decisions"])

        await until(decided, "a decision")
        assert await client.metric("wadiloco_controller_policy_failures_total") == 0
        assert await client.metric("wadiloco_controller_tick_failures_total") == 0

    play(make_settings(tmp_path, policy=policy), ManualClock(), run)


def test_an_impossible_parameter_of_a_policy_is_refused_by_field(tmp_path: Path) -> None:
    async def run(client: Client) -> None:
        for value in ("1" + "0" * 400, "1e300"):
            body = '{"name": "wa_diloco", "params": {"threshold": ' + value + "}}"
            answer = await client.http.put("/v1/policy", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 422
            assert "threshold" in answer.json()["field"]

    play(make_settings(tmp_path), ManualClock(), run)


def test_a_journal_with_an_impossible_budget_falls_back_to_the_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(tmp_path, budget_syncs=4)

    async def nothing(client: Client) -> None:
        assert (await client.get("/v1/budget"))["remaining"] == 4

    play(settings, ManualClock(), nothing)
    with sqlite3.connect(str(settings.journal)) as journal:
        huge = '"outer_syncs":1' + "0" * 400
        journal.execute("""UPDATE budget SET body = replace(body, '"outer_syncs":4', ?)""", (huge,))
    journal.close()
    play(settings, ManualClock(), nothing)
    assert "the budget of the journal is impossible" in caplog.text


def test_one_value_that_no_sample_can_hold_does_not_cost_the_scrape(tmp_path: Path) -> None:
    async def run(client: Client) -> None:
        state = client.controller.state
        state.budget = state.budget.model_copy(update={"remaining": 10**400})
        assert await client.metric("wadiloco_controller_budget_remaining_syncs") is None
        assert await client.metric("wadiloco_controller_budget_spent_syncs") == 0
        assert await client.metric("wadiloco_controller_scrape_failures_total") == 0

    play(make_settings(tmp_path), ManualClock(), run)
