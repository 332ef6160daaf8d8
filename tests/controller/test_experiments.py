"""Switchback experiments on the real controller in this process, with a simulated server and island."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from controller.config import ControllerSettings
from controller.experiment_records import TICKS_OF_ABSENCE
from controller.lab_schema import Arm, ExperimentState, ExperimentStatus, ExperimentVerdict
from tests.controller.helpers import Client, ManualClock, make_settings, play, sample
from tests.controller.sim_fleet import SimFleet

BLOCK_S, WASHOUT_S = 30, 4
TICK_S = 4


def order(**fields: Any) -> dict[str, Any]:
    base = {"a": {"name": "pressure_gate"}, "b": {"name": "fixed_h", "params": {"h": 2}}, "syncs_per_block": 2}
    times = {"blocks": 4, "block_s": BLOCK_S, "washout_s": WASHOUT_S, "min_gap_s": 5, "seed": 1}
    return base | times | fields


def settings(tmp_path: Path, **values: Any) -> ControllerSettings:
    """The background loop ticks seldom: the tests tick by hand."""
    return make_settings(tmp_path, tick_s=TICK_S, policy_params={"h": 50}, policy="fixed_h", **values)


async def start(client: Client, **fields: Any) -> ExperimentStatus:
    answer = await client.http.post("/v1/experiments", json=order(**fields))
    assert answer.status_code == 201, answer.text
    return ExperimentStatus.model_validate(answer.json())


async def look(client: Client, number: int = 1) -> ExperimentStatus:
    return ExperimentStatus.model_validate(await client.get(f"/v1/experiments/{number}"))


def with_fleet(body: Callable[[Client, SimFleet], Awaitable[None]], clock: ManualClock, *, seed: int = 0) -> Any:
    async def run(client: Client) -> None:
        fleet = SimFleet(client, clock, seed=seed)
        await fleet.register()
        await fleet.run(3)
        await body(client, fleet)

    return run


def test_the_policy_that_waits_for_lulls_is_found_to_be_better(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, fleet: SimFleet) -> None:
        started = await start(client, blocks=16)
        assert (started.state, started.blocks[0].index, len(started.order)) == (ExperimentState.RUNNING, 0, 16)
        await fleet.run(16 * BLOCK_S + 25)
        status = await look(client)
        assert status.state is ExperimentState.DONE
        result = status.result
        assert (result.verdict, result.pairs, result.pairs_left_out) == (ExperimentVerdict.A_BETTER, 8, 0)
        assert result.p_value is not None
        assert result.p_value < 0.02
        assert result.ci95 is not None
        assert result.ci95[1] < 0
        assert (result.syncs_a, result.syncs_b) == (2, 2)
        assert result.excess_a is not None
        assert result.excess_b is not None
        assert result.excess_a < result.excess_b
        assert (await client.get("/v1/policy"))["params"] == {"h": 50}
        assert (await client.get("/v1/budget"))["spec"]["outer_syncs"] is None

    play(settings(tmp_path), clock, with_fleet(body, clock))


def test_policies_that_do_the_same_show_no_difference(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, fleet: SimFleet) -> None:
        await start(client, blocks=12, a={"name": "fixed_h", "params": {"h": 3}})
        await fleet.run(12 * BLOCK_S + 25)
        result = (await look(client)).result
        assert (result.verdict, result.pairs) == (ExperimentVerdict.NO_DIFFERENCE, 6)

    play(settings(tmp_path), clock, with_fleet(body, clock, seed=4))


def test_each_block_has_its_policy_its_budget_and_no_sync_in_its_washout(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(4 * BLOCK_S + 20)
        status = await look(client)
        names = {Arm.A: "pressure_gate", Arm.B: "fixed_h"}
        assert [block.arm for block in status.blocks] == list(status.order)
        rounds = (await client.get("/v1/rounds"))["rounds"]
        for block in status.blocks:
            mine = [r for r in rounds if block.started_s <= r["directed_s"] < block.ends_s]
            assert {r["policy"] for r in mine} == {names[block.arm]}
            assert all(r["directed_s"] >= block.counts_from_s for r in mine)
            assert len(mine) == block.syncs == 2
            assert block.requests > 0
            assert 0 < block.requests_in_sync < block.requests
        # Every second that counts is in a block, and the samples of no washout are.
        seconds = sum(block.ends_s - block.counts_from_s for block in status.blocks)
        assert seconds == pytest.approx(4 * (BLOCK_S - WASHOUT_S), abs=4)

    play(settings(tmp_path), clock, with_fleet(body, clock))


def test_it_owns_policy_and_budget_while_it_runs_and_gives_them_back_when_stopped(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, fleet: SimFleet) -> None:
        before = await client.get("/v1/budget")
        await start(client)
        await fleet.run(10)
        for path, wanted in (("/v1/policy", {"name": "no_sync"}), ("/v1/budget", {"outer_syncs": 5})):
            refused = await client.http.put(path, json=wanted)
            assert (refused.status_code, refused.json()["field"]) == (409, path.removeprefix("/v1/"))
            assert "DELETE /v1/experiments/1" in refused.json()["remedy"]
        second = await client.http.post("/v1/experiments", json=order())
        assert (second.status_code, second.json()["field"]) == (409, "experiment")
        assert await client.metric("wadiloco_controller_experiment_block") == 0
        for _ in range(2):  # Stopping twice changes nothing.
            answer = await client.http.delete("/v1/experiments/1")
            assert (answer.status_code, answer.json()["state"]) == (200, "stopped")
        assert answer.json()["blocks"][0]["disturbance"] == "stopped"
        assert answer.json()["ends_s"] == answer.json()["ended_s"]
        assert (await client.get("/v1/policy"))["params"] == {"h": 50}
        after = await client.get("/v1/budget")
        assert {**after, "last_sync_s": None} == {**before, "last_sync_s": None}
        assert (await client.http.put("/v1/policy", json={"name": "no_sync"})).status_code == 200
        assert await client.metric("wadiloco_controller_experiment_block") is None
        assert (await client.http.post("/v1/experiments", json=order())).json()["id"] == 2
        listed = (await client.get("/v1/experiments"))["experiments"]
        assert [(one["id"], one["state"]) for one in listed] == [(1, "stopped"), (2, "running")]

    play(settings(tmp_path), clock, with_fleet(body, clock))


def test_what_cannot_work_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, fleet: SimFleet) -> None:
        refusals: list[tuple[dict[str, Any], str]] = [
            ({"blocks": 5}, "blocks"),
            ({"blocks": 1}, "body.blocks"),
            ({"block": 5}, "body.block"),
            ({"washout_s": 30}, "washout_s"),
            ({"a": {"name": "dance"}}, "a.name"),
            ({"syncs_per_block": 9, "min_gap_s": 0}, "syncs_per_block"),
        ]
        for fields, field in refusals:
            refused = await client.http.post("/v1/experiments", json=order(**fields))
            assert (refused.status_code, refused.json()["field"]) == (422, field)
            assert refused.json()["remedy"]
        assert (await client.http.get("/v1/experiments/1")).status_code == 404
        assert (await client.http.delete("/v1/experiments/1")).status_code == 404
        await client.http.post("/v1/control", json={"action": "pause"})
        paused = await client.http.post("/v1/experiments", json=order())
        assert (paused.status_code, paused.json()["remedy"]) == (409, "resume the run first")
        assert (await client.get("/v1/experiments"))["experiments"] == []
        assert (await client.get("/v1/policy"))["params"] == {"h": 50}

    play(settings(tmp_path), clock, with_fleet(body, clock))


def test_a_pause_disturbs_its_block_and_no_other(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(BLOCK_S + 10)
        await client.http.post("/v1/control", json={"action": "pause"})
        await fleet.run(3)
        await client.http.post("/v1/control", json={"action": "resume"})
        await fleet.run(3 * BLOCK_S)
        status = await look(client)
        assert [block.disturbance for block in status.blocks] == [None, "paused", None, None]
        assert (status.result.pairs, status.result.pairs_left_out) == (1, 1)

    play(settings(tmp_path), clock, with_fleet(body, clock))


def test_samples_count_for_the_block_of_their_time_and_only_of_bound_servers(tmp_path: Path) -> None:
    clock = ManualClock()

    async def post(client: Client, server_id: str, t_s: float, **fields: Any) -> None:
        told = {"interval_s": 1.0, "slo_requests": 100, "slo_violations": 7} | fields
        await client.http.post("/v1/samples", json={"samples": [sample(server_id, t_s, **told)]})

    async def body(client: Client) -> None:
        await client.register(server_id="vllm-0")
        await client.loop.tick()
        started = await start(client, washout_s=4)
        first = started.blocks[0]
        for _ in range(BLOCK_S + 1):
            clock.advance(1.0)
            await client.loop.tick()
        second = (await look(client)).blocks[1]
        await post(client, "vllm-0", first.counts_from_s)  # began in the washout
        await post(client, "vllm-9", first.ends_s - 5)  # nobody trains beside it
        await post(client, "vllm-0", first.ends_s - 5, slo_requests=None)
        assert (await look(client)).blocks[0].requests == 0
        await post(client, "vllm-0", first.ends_s - 4)
        await post(client, "vllm-0", first.ends_s + 0.5)  # over the end
        blocks = (await look(client)).blocks
        assert [(block.requests, block.violations) for block in blocks] == [(100, 7), (0, 0)]
        for _ in range(int(second.counts_from_s - clock.now_s) + 3):
            clock.advance(1.0)
            await client.loop.tick()
        await post(client, "vllm-0", clock.now_s, trainer_phase="sync")
        blocks = (await look(client)).blocks
        assert (blocks[1].requests, blocks[1].requests_in_sync, blocks[1].violations_in_sync) == (100, 100, 7)

    # No heartbeats here: the lease must outlast the test.
    play(settings(tmp_path, lease_timeout_s=600), clock, body)


def test_a_short_absence_goes_on_with_the_block_where_it_was(tmp_path: Path) -> None:
    clock = ManualClock()
    kept: list[Any] = []

    async def before(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(BLOCK_S + 15)
        status = await look(client)
        kept.extend([status.blocks, await client.get("/v1/budget"), fleet])

    async def after(client: Client) -> None:
        blocks, budget, fleet = kept
        found = await look(client)
        assert [one.model_copy(update={"seen_s": 0}) for one in found.blocks] == [
            one.model_copy(update={"seen_s": 0}) for one in blocks
        ]
        assert await client.get("/v1/budget") == budget
        assert (await client.get("/v1/policy"))["name"] in {"pressure_gate", "fixed_h"}
        refused = await client.http.put("/v1/policy", json={"name": "no_sync"})
        assert refused.status_code == 409
        fleet.client = client
        await fleet.run(3 * BLOCK_S)
        status = await look(client)
        assert (status.state, [block.attempt for block in status.blocks]) == (ExperimentState.DONE, [1, 1, 1, 1])
        assert [block.syncs for block in status.blocks] == [2, 2, 2, 2]
        assert (await client.get("/v1/policy"))["params"] == {"h": 50}

    play(settings(tmp_path), clock, with_fleet(before, clock))
    clock.advance(1.0)
    play(settings(tmp_path), clock, after)


def test_a_long_absence_begins_the_block_again(tmp_path: Path) -> None:
    clock = ManualClock()
    kept: list[SimFleet] = []

    async def before(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(BLOCK_S + 8)
        kept.append(fleet)

    async def after(client: Client) -> None:
        (fleet,) = kept
        fleet.client = client
        await client.loop.tick()
        block = (await look(client)).blocks[1]
        assert (block.attempt, block.started_s, block.requests) == (2, clock.now_s, 0)
        await fleet.run(3 * BLOCK_S + 20)
        status = await look(client)
        assert (status.state, [block.attempt for block in status.blocks]) == (ExperimentState.DONE, [1, 2, 1, 1])
        assert status.result.pairs == 2

    play(settings(tmp_path), clock, with_fleet(before, clock))
    clock.advance(TICKS_OF_ABSENCE * TICK_S + 2.0)
    play(settings(tmp_path), clock, after)


def test_a_block_of_a_clock_that_was_set_back_begins_again(tmp_path: Path) -> None:
    clock = ManualClock()

    async def before(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(BLOCK_S + 8)

    async def after(client: Client) -> None:
        await client.loop.tick()
        block = (await look(client)).blocks[1]
        assert (block.attempt, block.started_s) == (2, clock.now_s)

    play(settings(tmp_path), clock, with_fleet(before, clock))
    clock.advance(-3600.0)
    play(settings(tmp_path), clock, after)


def test_other_settings_after_a_restart_become_what_comes_back(tmp_path: Path) -> None:
    clock = ManualClock()

    async def before(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(5)

    async def after(client: Client) -> None:
        status = await look(client)
        assert (status.state, status.policy_after.name) == (ExperimentState.RUNNING, "no_sync")
        assert (await client.get("/v1/policy"))["name"] in {"pressure_gate", "fixed_h"}
        await client.http.delete("/v1/experiments/1")
        assert (await client.get("/v1/policy"))["name"] == "no_sync"

    play(settings(tmp_path), clock, with_fleet(before, clock))
    other = make_settings(tmp_path, tick_s=4, policy="no_sync")
    play(other, clock, after)
    fresh = tmp_path / "again"
    fresh.mkdir()
    clock = ManualClock()
    play(settings(fresh), clock, with_fleet(before, clock))
    play(make_settings(fresh, tick_s=4, policy="no_sync", min_h=10), clock, stopped_by_settings)


def test_a_policy_of_the_settings_that_is_also_an_arm_does_not_take_over_the_running_block(tmp_path: Path) -> None:
    for name, params in (("pressure_gate", {}), ("fixed_h", {"h": 10})):
        folder, clock = tmp_path / name, ManualClock()
        folder.mkdir()
        block: dict[str, str] = {}

        async def before(client: Client, fleet: SimFleet, block: dict[str, str] = block) -> None:
            await start(client)
            await fleet.run(5)
            block["policy"] = (await client.get("/v1/policy"))["name"]

        async def after(client: Client, block: dict[str, str] = block, name: str = name) -> None:
            assert (await client.get("/v1/policy"))["name"] == block["policy"]
            assert (await look(client)).policy_after.name == name
            await client.http.delete("/v1/experiments/1")
            assert (await client.get("/v1/policy"))["name"] == name

        play(settings(folder), clock, with_fleet(before, clock))
        play(make_settings(folder, tick_s=4, policy=name, policy_params=params), clock, after)


async def stopped_by_settings(client: Client) -> None:
    status = await look(client)
    assert status.state is ExperimentState.STOPPED
    assert "params.h" in status.detail
    assert (await client.get("/v1/policy"))["name"] == "no_sync"


def test_a_damaged_row_costs_the_experiment_and_not_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()

    async def before(client: Client, fleet: SimFleet) -> None:
        await start(client)

    async def after(client: Client) -> None:
        assert (await client.get("/v1/experiments"))["experiments"] == []
        assert (await client.http.get("/healthz")).status_code == 200

    play(settings(tmp_path), clock, with_fleet(before, clock))
    with sqlite3.connect(str(settings(tmp_path).journal)) as journal:
        journal.execute("UPDATE meta SET body = '{}' WHERE key = 'experiment:1'")
    journal.close()
    play(settings(tmp_path), clock, after)
    assert "experiment:1 cannot be read" in caplog.text


def test_a_block_that_is_lost_is_run_again_with_all_that_follow(tmp_path: Path) -> None:
    clock = ManualClock()
    kept: list[SimFleet] = []

    async def before(client: Client, fleet: SimFleet) -> None:
        await start(client)
        await fleet.run(2 * BLOCK_S + 10)
        assert len((await look(client)).blocks) == 3
        kept.append(fleet)

    async def after(client: Client) -> None:
        (fleet,) = kept
        fleet.client = client
        await fleet.run(3 * BLOCK_S + 20)
        status = await look(client)
        assert [block.index for block in status.blocks] == [0, 1, 2, 3]
        assert (status.state, status.result.pairs) == (ExperimentState.DONE, 2)

    play(settings(tmp_path), clock, with_fleet(before, clock))
    with sqlite3.connect(str(settings(tmp_path).journal)) as journal:
        journal.execute("DELETE FROM meta WHERE key = 'experiment:1:1'")
    journal.close()
    play(settings(tmp_path), clock, after)


def test_headroom_tells_what_the_policy_in_force_and_the_shadows_took(tmp_path: Path) -> None:
    clock = ManualClock()
    fleets: list[SimFleet] = []

    class Costs:
        def series(self, server_ids: Any, *, since_s: float, until_s: float) -> tuple[float | None, ...]:
            if not fleets:
                return (None,) * int(until_s - since_s)
            return fleets[0].series(server_ids, since_s=since_s, until_s=until_s)

    async def body(client: Client, fleet: SimFleet) -> None:
        fleets.append(fleet)
        await client.controller.lab.refresh()
        assert (await client.get("/v1/headroom"))["verdict"] == "too_little_data"
        assert await client.metric("wadiloco_controller_headroom_gap_violations") is None
        await fleet.run(420)
        await client.controller.lab.refresh()
        found = await client.get("/v1/headroom")
        assert found["verdict"] == "enough"
        assert found["oracle_cost"] < found["random_cost"]
        real, shadow = found["policies"]
        assert (real["policy"], real["shadow"], shadow["policy"]) == ("fixed_h:h=15", False, "pressure_gate")
        assert real["syncs"] >= len(fleet.starts_s) - 1
        assert shadow["share_closed"] > 0.5 > real["share_closed"]
        assert shadow["as_cheap_frac"] < 0.05
        name = "wadiloco_controller_headroom_policy_share_closed"
        labels = '{policy="pressure_gate",shadow="true"}'
        assert await client.metric(name + labels) == shadow["share_closed"]
        assert await client.metric('wadiloco_controller_headroom_verdict{verdict="enough"}') == 1
        other = await client.get("/v1/headroom", window_s=400)
        assert other["window_s"] == 400
        assert (await client.http.get("/v1/headroom", params={"window_s": 1})).status_code == 422

    fast = make_settings(
        tmp_path,
        tick_s=4,
        policy="fixed_h",
        policy_params={"h": 15},
        shadow_policies="pressure_gate",
        budget_syncs=100,
        budget_horizon_s=2000,
        min_gap_s=15,
    )

    play(fast, clock, with_fleet(body, clock), Costs())
