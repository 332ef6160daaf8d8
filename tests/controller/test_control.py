"""Drain, swap and resume over HTTP: who holds the slot, who is fenced, who is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.schema import SyncOutcome
from tests.controller.helpers import EPOCH_0, Client, ManualClock, make_settings, play, progress, report, until


async def order(client: Client, action: str, **fields: Any) -> dict[str, Any]:
    answer = await client.http.post("/v1/control", json={"action": action, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def islands(client: Client) -> dict[str, dict[str, Any]]:
    return {island["agent_id"]: island for island in await client.get("/v1/islands")}


async def stopped(client: Client, agent_id: str, *, after: int = 0) -> dict[str, Any]:
    answer = await client.directives(agent_id, after=after, wait_s=10)
    (stop,) = [directive for directive in answer["directives"] if directive["kind"] == "stop"]
    return dict(stop)


async def pair(client: Client) -> None:
    """``holder`` has the slot and has come to step 100; ``spare`` waits."""
    await client.register("holder")
    await client.beat("holder", epoch=1, progress=progress(5, step=100))
    await client.register("spare")


def test_a_swap_at_once_hands_the_slot_over_fenced_and_with_its_position(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await pair(client)
        reply = await order(client, "swap", slot=0, when="now")
        assert reply["effect"] == "holder gives up slot 0 at once, which goes to spare"
        assert (await stopped(client, "holder"))["reason"] == "swap"
        found = await islands(client)
        assert (found["holder"]["slot"], found["spare"]["slot"]) == (None, 0)
        refused = await client.try_beat("holder", epoch=1, progress=progress(6, step=101))
        assert (refused.status_code, refused.json()["field"]) == (409, "epoch")
        lease = await client.register("spare")
        assert (lease.slot, lease.resume.step if lease.resume else None) == (0, 100)
        again = await client.http.post(
            "/v1/agents", json={"agent_id": "holder", "instance": "first", "node": "host-a", "slot": 0}
        )
        assert (again.status_code, again.json()["field"]) == (409, "slot")
        assert (await client.register("holder")).slot is None
        kinds = [record["kind"] for record in (await client.get("/v1/recoveries", since=0))["recoveries"]]
        assert kinds == ["swapped", "spare_took_slot"]
        assert await client.metric('wadiloco_controller_control_actions_total{action="swap",outcome="done"}') == 1

    play(make_settings(tmp_path), clock, body)


def test_a_swap_waits_for_the_next_sync_that_does_not_fail(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await pair(client)
        await order(client, "swap", agent_id="holder")
        assert (await islands(client))["holder"]["leaving"] == "swap"
        await client.beat("holder", epoch=1, progress=progress(6, step=101))
        await client.beat("holder", epoch=1, syncs=[report(outcome=SyncOutcome.FAILED)])
        assert (await islands(client))["holder"]["slot"] == 0
        await client.beat("holder", epoch=1, syncs=[report(started_s=1.0)], progress=progress(0, step=102, round=1))
        found = await islands(client)
        assert (found["holder"]["slot"], found["spare"]["slot"], found["holder"]["leaving"]) == (None, 0, None)
        await stopped(client, "holder")
        lease = await client.register("spare")
        assert lease.resume is not None
        assert (lease.resume.step, lease.resume.round) == (102, 1)

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_swap_whose_spare_is_gone_takes_another_and_without_any_is_cancelled(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await pair(client)
        await order(client, "swap", slot=0, to_agent="spare")
        await client.http.delete("/v1/agents/spare", params={"instance": "first"})
        await client.beat("holder", epoch=1, syncs=[report()])
        found = await islands(client)
        assert (found["holder"]["slot"], found["holder"]["leaving"]) == (0, None)
        name = 'wadiloco_controller_control_actions_total{action="swap",outcome="cancelled"}'
        assert await client.metric(name) == 1
        await client.register("other")
        await client.register("spare", "second")
        await order(client, "swap", slot=0, to_agent="spare")
        await client.http.delete("/v1/agents/spare", params={"instance": "second"})
        await client.beat("holder", epoch=1, syncs=[report(1)], progress=progress(0, round=2))
        assert (await islands(client))["other"]["slot"] == 0

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_drained_agent_gets_no_slot_until_it_is_resumed(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await pair(client)
        await order(client, "drain", slot=0, when="now")
        assert (await stopped(client, "holder"))["reason"] == "drain"

        async def taken() -> bool:
            return bool((await islands(client))["spare"]["slot"] == 0)

        await until(taken, "the spare takes the slot")
        assert (await client.register("holder", slot=0)).slot is None
        await client.http.delete("/v1/agents/spare", params={"instance": "first"})
        assert (await client.register("holder", slot=0)).slot is None
        assert (await client.register("holder", "first")).slot is None
        assert (await islands(client))["holder"]["drained"]
        assert await client.metric("wadiloco_controller_agents_drained") == 1
        assert await client.metric("wadiloco_controller_agents_waiting") == 0
        reply = await order(client, "resume", agent_id="holder")
        assert reply["effect"] == "holder may hold a slot"

        async def back() -> bool:
            return bool((await islands(client))["holder"]["slot"] == 0)

        await until(back, "the resumed agent takes the free slot")
        assert not client.controller.state.paused

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_drained_agent_stays_so_through_restarts_of_itself_and_of_the_controller(tmp_path: Path) -> None:
    clock = ManualClock()

    async def first(client: Client) -> None:
        await pair(client)
        await order(client, "drain", agent_id="spare")
        await order(client, "drain", agent_id="holder")

    async def second(client: Client) -> None:
        found = await islands(client)
        assert (found["spare"]["drained"], found["holder"]["leaving"]) == (True, "drain")
        clock.advance(4)
        assert (await client.register("spare", "second")).slot is None
        # Its process was to leave after its sync; another one is there now, whose steps nobody waits for.
        await client.http.delete("/v1/agents/holder", params={"instance": "first"})
        assert (await client.register("holder", "second")).slot is None

    play(make_settings(tmp_path), clock, first)
    play(make_settings(tmp_path), clock, second)


def test_a_holder_that_dies_before_it_has_left_keeps_the_slot_for_nobody(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await pair(client)
        await order(client, "drain", slot=0)
        clock.advance(10.5)
        await client.register("spare")

        async def taken() -> bool:
            return bool((await islands(client))["spare"]["slot"] == 0)

        await until(taken, "the spare takes the slot without another lease of waiting")
        assert (await islands(client))["holder"]["drained"]

    play(make_settings(tmp_path), clock, body)


def test_a_drain_hands_its_slot_to_the_spare_that_it_named_and_no_other_order_gives_that_away(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        for index, name in enumerate(("a", "b")):
            await client.register(name)
            await client.beat(name, epoch=index + 1, progress=progress(1, step=100))
        await client.register("first")
        await client.register("second")
        assert (await order(client, "swap", slot=0))["effect"].endswith("which goes to first")
        assert (await order(client, "drain", slot=1))["effect"].endswith("which goes to second")
        refused = await client.http.post("/v1/control", json={"action": "swap", "slot": 0, "to_agent": "second"})
        assert (refused.status_code, refused.json()["field"]) == (409, "to_agent")
        await client.beat("b", epoch=2, syncs=[report()], progress=progress(0, step=101, round=1))
        found = await islands(client)
        assert (found["first"]["slot"], found["second"]["slot"], found["b"]["drained"]) == (None, 1, True)
        await client.beat("a", epoch=1, syncs=[report()], progress=progress(0, step=101, round=1))
        assert (await islands(client))["first"]["slot"] == 0

    play(make_settings(tmp_path, num_slots=2), ManualClock(), body)


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("pause", {}),
        ("resume", {}),
        ("sync_now", {}),
        ("drain", {"slot": 0}),
        ("swap", {"slot": 0, "when": "now"}),
        ("drain", {"node": "host-a", "when": "now"}),
    ],
)
def test_a_dry_run_says_what_would_happen_and_changes_nothing(
    tmp_path: Path, action: str, fields: dict[str, Any]
) -> None:
    async def body(client: Client) -> None:
        await pair(client)
        state = client.controller.state
        before = (dict(state.registry.records), state.registry.epoch, state.mailboxes.seq, state.paused)
        dry = await order(client, action, dry_run=True, **fields)
        assert dry["dry_run"]
        assert dry["effect"]
        assert before == (dict(state.registry.records), state.registry.epoch, state.mailboxes.seq, state.paused)
        assert state.rounds.open is None
        name = f'wadiloco_controller_control_actions_total{{action="{action}",outcome="dry_run"}}'
        assert await client.metric(name) == 1
        real = await order(client, action, **fields)
        assert (real["effect"], real["steps"], real["dry_run"]) == (dry["effect"], dry["steps"], False)

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_refusal_names_field_and_remedy_and_is_counted(tmp_path: Path, dry_run: bool) -> None:
    async def body(client: Client) -> None:
        refused: list[tuple[dict[str, Any], int]] = [
            ({"slot": 3}, 422),
            ({"agent_id": "nobody"}, 422),
            ({}, 422),
            ({"slot": 0}, 409),
        ]
        for fields, status in refused:
            request = {"action": "swap", "dry_run": dry_run, **fields}
            answer = await client.http.post("/v1/control", json=request)
            assert answer.status_code == status
            assert answer.json()["field"]
            assert answer.json()["remedy"]
        both = await client.http.post("/v1/control", json={"action": "drain", "slot": 0, "node": "host-a"})
        assert both.status_code == 422
        misspelt = await client.http.post("/v1/control", json={"action": "pause", "dryrun": True})
        assert (misspelt.status_code, client.controller.state.paused) == (422, False)
        name = 'wadiloco_controller_control_actions_total{action="swap",outcome="refused"}'
        assert await client.metric(name) == 4

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_round_goes_on_without_the_island_that_is_drained(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        for index, name in enumerate(("a", "b")):
            await client.register(name)
            await client.beat(name, epoch=index + 1, progress=progress(10))
        for name in ("a", "b"):
            answer = await client.directives(name, wait_s=10)
            assert answer["directives"][0]["kind"] == "sync"
        await client.beat("a", epoch=2, syncs=[report()], progress=progress(0, step=1001, round=1))
        await order(client, "drain", agent_id="b", when="now")

        async def closed() -> bool:
            return bool((await client.get("/v1/rounds"))["rounds"][0]["closed"])

        await until(closed, "the round closes without b")
        (round_,) = (await client.get("/v1/rounds"))["rounds"]
        assert (round_["slots_applied"], round_["slots_failed"]) == ([0], [1])
        assert (await client.get("/v1/fleet"))["epoch"] == EPOCH_0 + 3

    play(make_settings(tmp_path, num_slots=2), ManualClock(), body)


def test_islands_say_which_servers_they_are_bound_to(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register("by-node", node="host-a")
        await client.register("by-name", server_id="vllm-9", node="host-b")
        await client.register("alone", node="host-c")
        samples = [
            {"server_id": name, "node": node, "t_s": client.controller.clock(), "state": "ready", "pressure_frac": 0.2}
            for name, node in [("vllm-0", "host-a"), ("vllm-1", "host-a"), ("vllm-9", "host-z")]
        ]
        await client.http.post("/v1/samples", json={"samples": samples})
        found = await islands(client)
        assert {name: island["servers"] for name, island in found.items()} == {
            "by-node": ["vllm-0", "vllm-1"],
            "by-name": ["vllm-9"],
            "alone": [],
        }
        assert await client.metric("wadiloco_controller_islands_without_server") == 1
        assert (await client.get("/v1/fleet"))["num_unknown"] == 0

    play(make_settings(tmp_path, num_slots=3), ManualClock(), body)


def test_islands_that_no_sidecar_stands_beside_are_told_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()

    def warnings() -> int:
        return sum("no sidecar tells of the servers" in message for message in caplog.messages)

    async def body(client: Client) -> None:
        await client.register()

        async def warned() -> bool:
            clock.advance(5)
            await client.register()
            return warnings() > 0

        await until(warned, "a warning")
        decided = client.controller.state.last_decision_id

        async def later() -> bool:
            clock.advance(5)
            await client.register()
            return client.controller.state.last_decision_id > decided + 30

        await until(later, "more ticks, minutes later")
        assert warnings() == 1

    play(make_settings(tmp_path), clock, body)
