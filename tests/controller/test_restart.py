"""A controller that starts again on its journal goes on where the last one ended."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from controller.app import build_controller_app
from controller.journal_file import JournalReader
from service.errors import ConfigError
from sidecar.schema import LoadSample
from tests.controller.helpers import (
    EPOCH_0,
    START_S,
    Client,
    ManualClock,
    make_settings,
    play,
    progress,
    report,
    sample,
    until,
)


def test_a_restart_restores_registry_rounds_budget_policy_and_the_open_round(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, num_slots=2, budget_syncs=5)
    before: dict[str, object] = {}

    async def first(client: Client) -> None:
        await client.register("island-0", "a")
        await client.register("island-1", "b")
        for agent_id, instance in (("island-0", "a"), ("island-1", "b")):
            await client.beat(agent_id, instance, epoch=2, progress=progress(10))
        seq = (await client.directives("island-0", "a", wait_s=10))["seq"]
        for agent_id, instance in (("island-0", "a"), ("island-1", "b")):
            await client.beat(agent_id, instance, epoch=2, progress=progress(0, round=1), syncs=[report()])
        await client.http.put("/v1/policy", json={"name": "fixed_h", "params": {"h": 20}})
        for agent_id, instance in (("island-0", "a"), ("island-1", "b")):
            await client.beat(agent_id, instance, epoch=2, progress=progress(20, round=1))
        assert (await directed_of(client, "island-1", "b", seq + 1))["round"] == 1
        before["budget"] = await client.get("/v1/budget")
        before["rounds"] = await client.get("/v1/rounds")
        before["run_id"] = (await client.get("/v1/fleet"))["run_id"]
        before["decisions"] = len((await client.get("/v1/decisions", limit=10_000))["decisions"])

    async def second(client: Client) -> None:
        fleet = await client.get("/v1/fleet")
        assert (fleet["epoch"] - EPOCH_0, fleet["run_id"], fleet["rounds_closed"]) == (2, before["run_id"], 1)
        assert [(island["slot"], island["alive"]) for island in fleet["islands"]] == [(0, True), (1, True)]
        assert await client.get("/v1/budget") == before["budget"]
        assert await client.get("/v1/rounds") == before["rounds"]
        assert (await client.get("/v1/policy"))["params"] == {"h": 20}
        reply = await client.beat(
            "island-0", "a", epoch=2, syncs=[report(1, started_s=START_S + 5, finished_s=START_S + 6)]
        )
        assert reply.directive_seq > 4
        await client.beat("island-1", "b", epoch=2, syncs=[report(1, started_s=START_S + 5, finished_s=START_S + 6)])
        assert (await client.get("/v1/budget"))["spent"] == 2
        ids = [d["id"] for d in (await client.get("/v1/decisions", limit=10_000))["decisions"]]
        assert ids == sorted(set(ids))
        assert len(ids) >= int(str(before["decisions"]))

    play(settings, clock, first)
    clock.advance(30)
    play(settings, clock, second)


async def directed_of(client: Client, agent_id: str, instance: str, after: int) -> dict[str, object]:
    answer = await client.directives(agent_id, instance, after=after, wait_s=10)
    return dict(answer["directives"][-1])


def test_settings_that_changed_since_the_last_start_win_over_the_journal(tmp_path: Path) -> None:
    clock = ManualClock()

    async def change(client: Client) -> None:
        await client.http.put("/v1/policy", json={"name": "no_sync"})
        await client.http.put("/v1/budget", json={"outer_syncs": 7})

    async def kept(client: Client) -> None:
        assert (await client.get("/v1/policy"))["name"] == "no_sync"
        assert (await client.get("/v1/budget"))["remaining"] == 7

    async def replaced(client: Client) -> None:
        assert (await client.get("/v1/policy"))["name"] == "pressure_gate"
        assert (await client.get("/v1/budget"))["remaining"] == 3

    play(make_settings(tmp_path), clock, change)
    play(make_settings(tmp_path), clock, kept)
    play(make_settings(tmp_path, policy="pressure_gate", budget_syncs=3), clock, replaced)


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    async def nothing(client: Client) -> None:
        assert (await client.get("/v1/fleet"))["run_id"] == "one"

    play(make_settings(tmp_path, run_id="one"), ManualClock(), nothing)
    with pytest.raises(ConfigError, match="belongs to run one"):
        build_controller_app(make_settings(tmp_path, run_id="two"))
    play(make_settings(tmp_path), ManualClock(), nothing)


def test_samples_are_thinned_in_the_log_and_the_newest_of_each_server_is_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, journal_samples_every_s=10)

    async def push(client: Client) -> None:
        for _ in range(25):
            await client.http.post("/v1/samples", json={"samples": [sample(t_s=clock.now_s)]})
            clock.advance(1)

    play(settings, clock, push)
    reader = JournalReader(tmp_path / "journal.sqlite")
    assert [one.t_s - START_S for one in reader.samples()] == [0, 10, 20]
    assert [one.t_s - START_S for one in reader.values("servers", LoadSample)] == [24]


def test_what_is_old_leaves_the_journal_each_kind_in_its_time(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, retention_s=4 * 3600, samples_retention_s=2 * 3600, tick_s=0.02)

    async def age(client: Client) -> None:
        early = [sample("gone", clock.now_s), sample("gone-too", clock.now_s)]
        await client.http.post("/v1/samples", json={"samples": early})

        async def decided() -> bool:
            return bool((await client.get("/v1/decisions"))["decisions"])

        await until(decided, "a decision")
        reader = client.controller.state.reader
        # The newest row of a log stays, however old.
        for hours, num_samples, has_first in ((1, 2, True), (2, 1, True), (2, 1, False)):
            clock.advance(hours * 3600)

            async def pruned(num: int = num_samples, first: bool = has_first) -> bool:
                samples = list(reader.samples())
                decisions = reader.decisions(since=0, limit=1)
                return len(samples) == num and (decisions[0].t_s < START_S + 1) is first

            await until(pruned, f"the state after {hours} more hours")
        assert reader.values("servers", LoadSample) == []
        assert await client.metric('wadiloco_controller_journal_pruned_rows_total{table="samples"}') == 1
        assert (await client.metric("wadiloco_controller_journal_size_bytes") or 0) > 0
        assert await client.metric("wadiloco_controller_leading") == 1

    play(settings, clock, age)


async def sync_once(client: Client) -> None:
    """A run whose first outer step is known."""
    await client.register(num_fragments=4)
    await client.beat(epoch=1, progress=progress(10))
    await client.beat(epoch=1, progress=progress(0, round=1), syncs=[report()])
    assert (await client.get("/v1/budget"))["spent"] == 1


def test_a_run_that_has_begun_keeps_its_fragments(tmp_path: Path) -> None:
    play(make_settings(tmp_path, num_fragments=3), ManualClock(), sync_once)
    with pytest.raises(ConfigError, match="has 3, not 2") as caught:
        build_controller_app(make_settings(tmp_path, num_fragments=2))
    assert (caught.value.field, caught.value.remedy) == (
        "num_fragments",
        "give --num-fragments 3, or begin another run with another --journal",
    )

    async def goes_on(client: Client) -> None:
        assert (await client.get("/v1/budget"))["spent"] == 1

    play(make_settings(tmp_path, num_fragments=3), ManualClock(), goes_on)


def test_a_run_from_before_there_were_fragments_has_one(tmp_path: Path) -> None:
    play(make_settings(tmp_path), ManualClock(), sync_once)
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        assert journal.execute("DELETE FROM meta WHERE key = 'num_fragments'").rowcount == 1
    journal.close()
    with pytest.raises(ConfigError, match="has 1, not 2"):
        build_controller_app(make_settings(tmp_path, num_fragments=2))


def test_a_run_that_has_not_begun_may_have_other_fragments(tmp_path: Path) -> None:
    async def wait(client: Client) -> None:
        lease = await client.register(num_fragments=4)
        assert lease.num_fragments == client.controller.state.settings.num_fragments

    for number in (3, 2):
        play(make_settings(tmp_path, num_fragments=number), ManualClock(), wait)


def test_every_round_counts_as_one_sync_whichever_fragment_it_moves(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, num_fragments=3, budget_syncs=20, policy="no_sync")

    async def first(client: Client) -> None:
        await client.register(num_fragments=4)
        await client.beat(epoch=1, progress=progress(10))
        for number in range(4):
            done = report(number, started_s=START_S + number, finished_s=START_S + number + 1, pushed_s=None)
            await client.beat(epoch=1, progress=progress(0, round=number + 1), syncs=[done])
        assert (await client.get("/v1/budget"))["spent"] == 4

    async def second(client: Client) -> None:
        # While nobody looked, two more fragments were synced: the run is at its seventh round.
        await client.beat(epoch=1, progress=progress(0, round=6))
        assert (await client.get("/v1/budget"))["spent"] == 6
        rounds = (await client.get("/v1/rounds"))["rounds"]
        assert [(entry["round"], entry["reason"]) for entry in rounds[-2:]] == [(4, "unreported"), (5, "unreported")]

    play(settings, clock, first)
    clock.advance(5)
    play(settings, clock, second)
