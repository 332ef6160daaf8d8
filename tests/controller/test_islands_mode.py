"""Rounds to which each island comes at its own moment, in a controller in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controller.config import ControllerSettings
from controller.schema import Reason
from diloco.schema import SyncOutcome
from service.errors import ConfigError
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

NAMES = ("island-0", "island-1", "island-2")
NEVER_S = 10.0
"""The ticks are the test's."""


def settings_of(directory: Path, **values: Any) -> ControllerSettings:
    base: dict[str, Any] = {"mode": "per_island", "num_slots": 3, "policy": "pressure_gate", "tick_s": NEVER_S}
    base |= {"policy_params": {"threshold": 0.5}, "sync_timeout_s": 600.0, "stale_after_s": 200.0}
    return make_settings(directory, **{**base, "lease_timeout_s": 500.0, **values})


async def load(client: Client, **pressures: float) -> None:
    now_s = client.controller.clock()
    batch = [sample(name, node=name, t_s=now_s, pressure_frac=value) for name, value in pressures.items()]
    answer = await client.http.post("/v1/samples", json={"samples": batch})
    assert answer.json()["accepted"] == len(batch)


async def join_all(client: Client, *, h: int = 20, **fields: Any) -> None:
    """Three islands, each beside a server of its own: s0, s1, s2."""
    for index, name in enumerate(NAMES):
        await client.register(name, server_id=f"s{index}")
    for name in NAMES:
        await beat(client, name, progress=progress(h, **fields))


async def beat(client: Client, name: str, **fields: Any) -> None:
    epoch = client.controller.state.registry.epoch - EPOCH_0
    await client.beat(name, epoch=epoch, **fields)


async def told(client: Client, name: str) -> list[dict[str, Any]]:
    found = (await client.directives(name))["directives"]
    return [directive for directive in found if directive["kind"] == "sync"]


async def decided(client: Client) -> list[tuple[tuple[int, ...], str]]:
    await client.controller.state.journal.commit()
    page = await client.get("/v1/decisions", limit=10_000)
    assert all(one["slots"] == ([] if one["slot"] is None else [one["slot"]]) for one in page["decisions"])
    return [(tuple(one["slots"]), one["reason"]) for one in page["decisions"]]


async def about_islands(client: Client) -> list[tuple[tuple[int, ...], str]]:
    return [(slots, reason) for slots, reason in await decided(client) if slots]


async def ticked(client: Client) -> bool:
    return bool(await client.metric("wadiloco_controller_tick_seconds_count"))


async def spent(client: Client) -> int:
    return int((await client.get("/v1/budget"))["spent"])


def test_a_round_opens_with_the_first_and_the_others_come_when_it_suits_them_or_when_it_is_due(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.9, s2=0.9)
        await client.loop.tick()
        (first,) = await told(client, "island-0")
        assert (first["round"], first["quorum"], first["expected"], first["overlap"]) == (0, 3, 3, True)
        assert (first["deadline_s"], first["close_by_s"]) == (START_S + 600, START_S + 480)
        assert await told(client, "island-1") == await told(client, "island-2") == []
        clock.advance(10)
        await load(client, s0=0.1, s1=0.2, s2=0.9)
        await client.loop.tick()
        (second,) = await told(client, "island-1")
        assert (second["round"], second["reason"]) == (0, Reason.PRESSURE_LOW)
        assert (second["t_s"], second["deadline_s"]) == (START_S + 10, START_S + 600)
        assert await told(client, "island-2") == []
        clock.advance(290)
        await client.loop.tick()
        (third,) = await told(client, "island-2")
        assert third["reason"] == Reason.ROUND_DUE
        assert len(await told(client, "island-0")) == 1
        for name in NAMES:
            await beat(client, name, syncs=[report(finished_s=START_S + 31)], progress=progress(0, step=1100, round=1))
        (entry,) = (await client.get("/v1/rounds"))["rounds"]
        assert (entry["closed"], entry["slots_applied"]) == (True, [0, 1, 2])
        assert await spent(client) == 1
        seen = await decided(client)
        assert ((0,), "pressure_low") in seen
        assert ((1,), "pressure_high") in seen
        assert ((2,), "round_due") in seen

    play(settings_of(tmp_path, budget_syncs=5), clock, body)


def test_waiting_is_journalled_when_its_reason_changes_or_after_a_while(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await until(partial(ticked, client), "the controller's own first tick, which is not the test's")
        await join_all(client, h=1)
        await load(client, s0=0.9, s1=0.9, s2=0.9)
        for _ in range(5):
            await client.loop.tick()
        assert sorted(await about_islands(client)) == [((slot,), "below_min_h") for slot in range(3)]
        assert (
            await client.metric(
                'wadiloco_controller_decisions_total{action="defer",policy="pressure_gate",reason="below_min_h"}'
            )
            == 15
        )
        await beat(client, "island-1", progress=progress(20, step=1020))
        for _ in range(3):
            await client.loop.tick()
        assert (await about_islands(client))[3:] == [((1,), "pressure_high")]
        clock.advance(60)
        await client.loop.tick()
        assert len(await about_islands(client)) == 7

    play(settings_of(tmp_path, decision_journal_s=60.0), clock, body)


def test_a_quorum_below_all_is_told_and_an_island_that_missed_the_end_is_sent_after_it(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.1, s2=0.9)
        await client.loop.tick()
        (directive,) = await told(client, "island-1")
        assert (directive["quorum"], directive["expected"]) == (2, 3)
        clock.advance(3)
        for name in NAMES[:2]:
            await beat(client, name, syncs=[report()], progress=progress(0, step=1100, round=1))
        await client.loop.tick()
        (late,) = await told(client, "island-2")
        assert (late["round"], late["reason"]) == (0, Reason.ROUND_DUE)
        stale = report(outcome=SyncOutcome.STALE, staleness=1, staleness_weight=0.7)
        await beat(client, "island-2", syncs=[stale], progress=progress(20, step=1100, round=1))
        (entry,) = (await client.get("/v1/rounds"))["rounds"]
        assert (entry["closed"], entry["slots_applied"], entry["slots_stale"]) == (True, [0, 1], [2])
        assert entry["slots_late"] == [2]
        assert await spent(client) == 1

    play(settings_of(tmp_path, quorum=2), clock, body)


def test_a_controller_that_was_killed_goes_on_with_the_open_round(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = settings_of(tmp_path, budget_syncs=5)

    async def before(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.9, s2=0.9)
        await client.loop.tick()

    async def after(client: Client) -> None:
        await beat(client, "island-0", syncs=[], progress=progress(20))
        for name in NAMES[1:]:
            await beat(client, name, progress=progress(25, step=1005))
        await load(client, s0=0.1, s1=0.1, s2=0.9)
        await client.loop.tick()
        assert len(await told(client, "island-0")) == 1
        (second,) = await told(client, "island-1")
        assert (second["round"], second["deadline_s"]) == (0, START_S + 600)
        clock.advance(295)
        await client.loop.tick()
        assert [one["reason"] for one in await told(client, "island-2")] == ["round_due"]
        for name in NAMES:
            await beat(client, name, syncs=[report(finished_s=START_S + 31)], progress=progress(0, step=1100, round=1))
        assert await spent(client) == 1

    play(settings, clock, before)
    clock.advance(5)
    play(settings, clock, after)


def test_an_agent_that_comes_back_is_told_again_only_if_it_had_been_told(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.9, s2=0.9)
        await client.loop.tick()
        for name, times in (("island-0", 2), ("island-1", 0)):
            await client.http.delete(f"/v1/agents/{name}", params={"instance": "first"})
            await client.register(name, "second")
            found = (await client.directives(name, "second"))["directives"]
            assert len(found) == times

    play(settings_of(tmp_path), ManualClock(), body)


def test_sync_now_opens_a_round_or_calls_those_who_wait(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.9, s2=0.9)
        await client.loop.tick()
        reply = await client.http.post("/v1/control", json={"action": "sync_now"})
        assert reply.json()["effect"] == "the other 2 islands are told to come to the open round"
        assert [one["reason"] for one in await told(client, "island-2")] == ["manual"]
        assert len(await told(client, "island-0")) == 1

    play(settings_of(tmp_path), ManualClock(), body)


def test_a_paused_fleet_neither_opens_nor_joins(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.9, s2=0.9)
        await client.loop.tick()
        await client.http.post("/v1/control", json={"action": "pause"})
        clock.advance(310)
        await client.loop.tick()
        assert await told(client, "island-1") == []
        assert ((1,), "paused") in await decided(client)

    play(settings_of(tmp_path), clock, body)


def test_no_island_is_no_decision_about_one(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        for _ in range(3):
            await client.loop.tick()
        assert await decided(client) == [((), "no_islands")]

    play(settings_of(tmp_path), ManualClock(), body)


def test_more_islands_than_one_tick_can_tell_come_at_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.islands_mode.MAX_TOLD_PER_TICK", 2)

    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.1, s2=0.1)
        await client.loop.tick()
        assert [len(await told(client, name)) for name in NAMES] == [1, 1, 0]
        await client.loop.tick()
        assert [len(await told(client, name)) for name in NAMES] == [1, 1, 1]

    play(settings_of(tmp_path), ManualClock(), body)


def test_islands_that_cannot_sync_so_many_fragments_are_refused(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        answer = await client.http.post("/v1/agents", json=registration().model_dump(mode="json"))
        assert (answer.status_code, answer.json()["field"]) == (422, "num_fragments")
        assert "--num-fragments 1" in answer.json()["remedy"]
        await client.register(num_fragments=4)

    play(settings_of(tmp_path, num_fragments=4, num_slots=1), ManualClock(), body)


def test_directives_name_the_fragments_in_turn(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register(num_fragments=4, server_id="s0")
        seen = []
        for number in (2, 3, 4):
            await beat(client, "island-0", progress=progress(20, step=1000 + number, round=number))
            await load(client, s0=0.1)
            await client.loop.tick()
            seen.append((await told(client, "island-0"))[-1]["fragments"])
            clock.advance(10)
            done = report(number, started_s=START_S + number, finished_s=START_S + number + 1, pushed_s=None)
            await beat(client, "island-0", syncs=[done])
        assert seen == [[2], [3], [0]]

    play(settings_of(tmp_path, num_fragments=4, num_slots=1), clock, body)


@pytest.mark.parametrize("values", [{"quorum": 4}, {"sync_timeout_s": 19.0}, {"mode": "sometimes"}])
def test_settings_that_cannot_work_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError), match=next(iter(values))):
        settings_of(tmp_path, **values)


def test_in_synchronous_mode_all_are_told_at_once_and_wait(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await join_all(client)
        await load(client, s0=0.1, s1=0.2, s2=0.3)
        await client.loop.tick()
        for name in NAMES:
            (directive,) = await told(client, name)
            assert (directive["quorum"], directive["expected"], directive["overlap"]) == (2, 3, False)
            assert directive["close_by_s"] == START_S + 480

    play(settings_of(tmp_path, mode="synchronous", quorum=2), ManualClock(), body)
