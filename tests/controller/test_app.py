"""The controller in one process: every endpoint, the loop behind it, and a restart from the journal."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.policy.base import Decision, FleetView
from controller.schema import Action, Reason
from diloco.schema import SyncOutcome
from tests.controller.helpers import (
    EPOCH_0,
    START_S,
    Client,
    ManualClock,
    make_settings,
    play,
    progress,
    registration,
    report,
    sample,
    until,
)


async def directed(client: Client, agent_id: str = "island-0", *, after: int = 0) -> dict[str, Any]:
    """The next sync directive of an agent."""
    answer = await client.directives(agent_id, after=after, wait_s=10)
    (directive,) = answer["directives"]
    assert directive["kind"] == "sync"
    return dict(directive)


async def reasons(client: Client) -> list[str]:
    page = await client.get("/v1/decisions", limit=10_000)
    return [decision["reason"] for decision in page["decisions"]]


def test_a_round_from_progress_to_budget(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        lease = await client.register(server_id="vllm-0")
        assert (lease.slot, lease.epoch - EPOCH_0, lease.min_h, lease.autonomy.max_syncs) == (0, 1, 2, 3)
        await client.beat(epoch=1, progress=progress(10))
        directive = await directed(client)
        assert (directive["round"], directive["epoch"], directive["reason"]) == (0, EPOCH_0 + 1, "fixed_h_reached")
        assert directive["deadline_s"] == START_S + 60
        clock.advance(3)
        reply = await client.beat(epoch=1, syncs=[report()], progress=progress(0, round=1))
        assert reply.syncs_acknowledged == 1
        (round_,) = (await client.get("/v1/rounds"))["rounds"]
        assert (round_["closed"], round_["slots_applied"], round_["reason"]) == (True, [0], "fixed_h_reached")
        budget = await client.get("/v1/budget")
        assert (budget["spent"], budget["remaining"], budget["last_sync_s"]) == (1, 2, START_S)
        fleet = await client.get("/v1/fleet")
        assert (fleet["rounds_closed"], fleet["epoch"] - EPOCH_0) == (1, 1)
        assert await client.metric('wadiloco_controller_rounds_total{outcome="applied"}') == 1
        assert await client.metric("wadiloco_controller_budget_remaining_syncs") == 2

    play(make_settings(tmp_path, budget_syncs=3), clock, body)


def test_decisions_carry_their_terms_and_can_be_paged(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(5))

        async def decided() -> bool:
            return "score_below_threshold" in await reasons(client)

        await until(decided, "a decision about the score")
        page = await client.get("/v1/decisions", limit=10_000)
        last = page["decisions"][-1]
        assert page["next_since"] == last["id"]
        assert last["slots"] == [0]
        assert {"score", "threshold", "value_loss", "cost_inference", "h", "pressure", "unknown_servers"} <= set(
            last["terms"]
        )
        assert last["terms"]["pressure"] == 1.0
        newer = await client.get("/v1/decisions", since=last["id"])
        assert all(decision["id"] > last["id"] for decision in newer["decisions"])

    play(make_settings(tmp_path, policy="wa_diloco"), ManualClock(), body)


def test_a_directive_reaches_a_waiting_agent_before_its_next_question(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        poll = asyncio.create_task(client.directives(wait_s=10))
        await client.beat(epoch=1, progress=progress(10))
        answer = await asyncio.wait_for(poll, 5)
        assert len(answer["directives"]) == 1
        seq = answer["seq"]
        empty = await client.directives(after=seq, wait_s=0)
        assert empty == {"directives": [], "seq": seq}

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_stop_releases_long_polls_at_once(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        poll = asyncio.create_task(client.directives(wait_s=30))

        async def waiting() -> bool:
            return bool(client.controller.state.mailboxes._news)

        await until(waiting, "a poll")
        started_s = time.monotonic()
        client.controller.state.mailboxes.close()
        assert (await poll)["directives"] == []
        assert time.monotonic() - started_s < 5

    play(make_settings(tmp_path), ManualClock(), body)


def test_all_islands_of_the_group_are_directed_and_one_dead_island_does_not_hold_the_round(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register("island-0", "a")
        await client.beat("island-0", "a", epoch=1, progress=progress(10))

        async def waits() -> bool:
            return "islands_not_ready" in await reasons(client)

        await until(waits, "waiting for the second slot")
        await client.register("island-1", "b")
        await client.beat("island-1", "b", epoch=2, progress=progress(12))
        for agent_id, instance in (("island-0", "a"), ("island-1", "b")):
            answer = await client.directives(agent_id, instance, wait_s=10)
            assert answer["directives"][0]["round"] == 0
        clock.advance(6)
        await client.beat("island-0", "a", epoch=2, syncs=[report()])
        clock.advance(6)
        await client.beat("island-0", "a", epoch=2, progress=progress(1, round=1))

        async def closed() -> bool:
            return bool((await client.get("/v1/rounds"))["rounds"][0]["closed"])

        await until(closed, "the round closes without the dead island")
        (round_,) = (await client.get("/v1/rounds"))["rounds"]
        assert (round_["slots_applied"], round_["slots_failed"]) == ([0], [1])
        refused = await client.try_beat("island-1", "b", epoch=2)
        assert (refused.status_code, refused.json()["remedy"]) == (409, "register again")
        assert (await client.get("/v1/fleet"))["epoch"] == EPOCH_0 + 3

    play(make_settings(tmp_path, num_slots=2), clock, body)


def test_nonsense_is_refused_by_field_and_the_last_good_progress_stays(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(5))
        path, as_json = "/v1/agents/island-0/heartbeat", {"Content-Type": "application/json"}
        head = f'{{"instance": "first", "epoch": {EPOCH_0 + 1}, "t_s": 1, "progress": '
        good = '"inner_steps_since_sync": 6, "tokens": 1, "tokens_since_sync": 1'
        for progress_json, field in [
            (f'{{"step": -1, {good}}}', "body.progress.step"),
            (f'{{"step": 1001, {good}, "loss": NaN}}', "body.progress.loss"),
            (f'{{"step": 1001, {good}, "loss": 1e999}}', "body.progress.loss"),
            (f'{{"step": 1{"0" * 40}, {good}}}', "body.progress.step"),
            (f'{{"step": 999, {good}}}', "progress.step"),
            (f'{{"step": 1001, {good}, "loss": 1e12}}', "progress.loss"),
        ]:
            answer = await client.http.post(path, content=head + progress_json + "}", headers=as_json)
            assert (answer.status_code, answer.json()["field"]) == (422, field)
        text = await client.try_beat(epoch=1, syncs=[report(detail="fine")])
        assert text.status_code == 200
        half = report().model_dump_json().replace('"detail":""', '"detail":"\\ud800"')
        content = f'{{"instance": "first", "epoch": {EPOCH_0 + 1}, "t_s": 1, "syncs": [{half}]}}'
        answer = await client.http.post(path, content=content, headers=as_json)
        assert answer.status_code == 422
        (island,) = await client.get("/v1/islands")
        assert island["progress"]["step"] == 1000
        assert await client.metric('wadiloco_controller_reports_total{outcome="nonsense"}') == 2
        assert await client.metric('wadiloco_controller_reports_total{outcome="invalid"}') == 5
        assert (await client.http.get("/healthz")).status_code == 200

    play(make_settings(tmp_path), ManualClock(), body)


def test_samples_are_judged_one_by_one(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        batch = {"samples": [sample(), sample(), {"server_id": "x"}, 7, sample("vllm-1", pressure_frac=None)]}
        receipt = (await client.http.post("/v1/samples", json=batch)).json()
        assert receipt["accepted"] == 2
        assert [(one["index"], one["reason"]) for one in receipt["rejected"]] == [
            (1, "duplicate"),
            (2, "invalid"),
            (3, "invalid"),
        ]
        fleet = await client.get("/v1/fleet")
        assert [server["known"] for server in fleet["servers"]] == [True, False]
        assert fleet["num_unknown"] == 1
        assert await client.metric('wadiloco_controller_servers{load="unknown"}') == 1
        assert await client.metric('wadiloco_controller_samples_total{outcome="duplicate"}') == 1

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_second_process_of_an_agent_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        second = registration(instance="second").model_dump(mode="json")
        refused = await client.http.post("/v1/agents", json=second)
        assert (refused.status_code, refused.json()["field"]) == (409, "instance")
        wrong = await client.http.delete("/v1/agents/island-0", params={"instance": "second"})
        assert wrong.status_code == 409
        left = await client.http.delete("/v1/agents/island-0", params={"instance": "first"})
        assert left.status_code == 204
        assert (await client.register(instance="second")).slot == 0
        assert (await client.try_beat(epoch=1)).status_code == 409
        poll = await client.http.get("/v1/agents/island-0/directives", params={"instance": "first"})
        assert poll.status_code == 409

    play(make_settings(tmp_path), ManualClock(), body)


def test_pausing_tells_the_islands_and_stops_decisions(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.http.post("/v1/control", json={"action": "pause"})
        answer = await client.directives(wait_s=5)
        assert [directive["kind"] for directive in answer["directives"]] == ["pause"]
        reply = await client.beat(epoch=1, progress=progress(50))
        assert reply.paused

        async def paused() -> bool:
            return (await reasons(client))[-1] == "paused"

        await until(paused, "a paused decision")
        refused = await client.http.post("/v1/control", json={"action": "sync_now"})
        assert (refused.status_code, refused.json()["remedy"]) == (409, "resume the run first")
        await client.http.post("/v1/control", json={"action": "resume"})
        kinds = [d["kind"] for d in (await client.directives(after=answer["seq"], wait_s=5))["directives"]]
        assert kinds[0] == "resume"

    play(make_settings(tmp_path), ManualClock(), body)


def test_sync_now_overrides_policy_and_gap_but_not_a_round_in_flight(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        not_ready = await client.http.post("/v1/control", json={"action": "sync_now"})
        assert not_ready.status_code == 409
        await client.beat(epoch=1, progress=progress(1))
        answer = await client.http.post("/v1/control", json={"action": "sync_now"})
        assert answer.status_code == 200
        assert (await directed(client))["reason"] == "manual"
        again = await client.http.post("/v1/control", json={"action": "sync_now"})
        assert (again.status_code, again.json()["message"]) == (409, "cannot sync: sync_in_flight")

    play(make_settings(tmp_path), ManualClock(), body)


def test_policy_and_budget_can_be_changed_and_nonsense_is_refused(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        wrong = await client.http.put("/v1/policy", json={"name": "fixed_h", "params": {"hh": 5}})
        assert (wrong.status_code, wrong.json()["field"]) == (422, "params.hh")
        assert (await client.get("/v1/policy"))["name"] == "fixed_h"
        assert (await client.http.put("/v1/policy", json={"name": "no_sync"})).status_code == 200
        lease = await client.register()
        assert not lease.autonomy.allowed
        clock.advance(5)
        budget = (await client.http.put("/v1/budget", json={"outer_syncs": 2, "horizon_s": 60})).json()
        assert (budget["started_s"], budget["spent"], budget["remaining"]) == (START_S + 5, 0, 2)
        bad = await client.http.put("/v1/budget", json={"outer_syncs": 9, "horizon_s": 60, "min_gap_s": 30})
        assert (bad.status_code, bad.json()["field"]) == (422, "horizon_s")
        assert (await client.get("/v1/budget"))["spec"]["outer_syncs"] == 2

    play(make_settings(tmp_path), clock, body)


def test_an_agent_that_comes_back_during_a_round_is_told_again_under_its_new_epoch(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(10))
        before = await directed(client)
        clock.advance(4)
        lease = await client.register(instance="second")
        assert lease.epoch > before["epoch"]
        (again,) = (await client.directives(instance="second", after=lease.directive_seq, wait_s=0))["directives"]
        same = ("kind", "round", "quorum", "deadline_s", "reason")
        assert [again[name] for name in same] == [before[name] for name in same]
        assert (again["epoch"], again["seq"] > before["seq"]) == (lease.epoch, True)
        assert lease.resume is not None
        assert lease.resume.step == progress(10).step

    play(make_settings(tmp_path), clock, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/budget", {"syncs": 2}),
        ("/v1/policy", {"name": "fixed_h", "parms": {"h": 5}}),
    ],
)
def test_a_misspelt_order_is_refused_and_changes_nothing(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def play_it(client: Client) -> None:
        before = await client.get(path)
        refused = await client.http.put(path, json=body)
        assert refused.status_code == 422
        assert refused.json()["field"] in {"body.syncs", "body.parms"}
        assert await client.get(path) == before

    play(make_settings(tmp_path), ManualClock(), play_it)


def test_without_since_the_newest_decisions_are_shown(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        async def decided() -> bool:
            return len(await reasons(client)) >= 4

        await until(decided, "four decisions")
        newest = (await client.get("/v1/decisions", limit=2))["decisions"]
        assert [decision["id"] for decision in newest] == [newest[0]["id"], newest[0]["id"] + 1]
        assert newest[-1]["id"] >= 4
        oldest = (await client.get("/v1/decisions", since=0, limit=2))["decisions"]
        assert [decision["id"] for decision in oldest] == [1, 2]

    play(make_settings(tmp_path), ManualClock(), body)


def test_islands_may_not_sync_alone_once_the_budget_is_over(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        assert (await client.register()).autonomy.allowed
        clock.advance(61)
        assert not (await client.register()).autonomy.allowed

    play(make_settings(tmp_path, budget_syncs=2, budget_horizon_s=60), clock, body)


def test_a_sync_that_islands_began_themselves_is_a_round_and_spends_budget(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(1, round=5), syncs=[report(4, autonomous=True)])
        (round_,) = (await client.get("/v1/rounds"))["rounds"]
        assert (round_["round"], round_["decision_id"], round_["reason"]) == (4, None, "autonomous")
        assert (await client.get("/v1/budget"))["spent"] == 1
        assert await client.metric("wadiloco_controller_round") == 5

    play(make_settings(tmp_path, budget_syncs=2), ManualClock(), body)


@dataclass
class Broken:
    """Raises, or answers with a term that is no number."""

    terms: dict[str, float] | None
    name: str = "broken"
    syncs: bool = True

    def decide(self, view: FleetView, now_s: float) -> Decision:
        if self.terms is None:
            raise RuntimeError("boom")
        return Decision(action=Action.SYNC, reason=Reason.MANUAL, terms=self.terms)


@pytest.mark.parametrize("terms", [None, {"score": float("nan")}])
@pytest.mark.parametrize(("h", "reason"), [(50, "policy_failed"), (100, "max_h_reached")])
def test_a_policy_that_raises_defers_until_max_h(
    tmp_path: Path, h: int, reason: str, terms: dict[str, float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: Client) -> None:
        client.controller.state.policy = Broken(terms)
        await client.register()
        await client.beat(epoch=1, progress=progress(h))

        async def decided() -> bool:
            return reason in await reasons(client)

        await until(decided, reason)
        failures = await client.metric("wadiloco_controller_policy_failures_total")
        assert failures is not None
        assert failures > 0

        async def failed_again() -> bool:
            return (await client.metric("wadiloco_controller_policy_failures_total") or 0) > failures + 2

        await until(failed_again, "further failures")
        assert (await client.http.get("/healthz")).status_code == 200
        told = [record for record in caplog.records if "policy failed" in record.getMessage()]
        assert len(told) == 1, "a traceback with each tick"
        assert told[0].exc_info

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_failed_round_is_tried_again_under_the_same_number(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(20))
        first = await directed(client)
        await client.beat(epoch=1, progress=progress(25), syncs=[report(outcome=SyncOutcome.FAILED)])
        assert (await client.get("/v1/budget"))["spent"] == 0
        clock.advance(5)
        second = await directed(client, after=int(str(first["seq"])))
        assert second["round"] == 0
        assert await client.metric('wadiloco_controller_rounds_total{outcome="failed"}') == 1

    play(make_settings(tmp_path), clock, body)


def test_every_request_has_an_example_and_every_endpoint_is_documented(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        paths = (await client.get("/openapi.json"))["paths"]
        for path, methods in paths.items():
            for method, operation in methods.items():
                assert operation.get("summary"), (method, path)
                if "requestBody" in operation:
                    assert operation["requestBody"]["content"]["application/json"]["examples"], (method, path)

    play(make_settings(tmp_path), ManualClock(), body)
