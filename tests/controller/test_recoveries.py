"""What was lost, who took it, and when it trained again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.journal import Journal
from controller.journal_file import JournalReader
from controller.journal_tables import recovery_row
from tests.controller.export.journals import recovery
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress, until


async def kinds(client: Client) -> list[str]:
    return [record["kind"] for record in (await client.get("/v1/recoveries", since=0))["recoveries"]]


async def seen(client: Client, kind: str) -> dict[str, Any]:
    """The newest record of a kind, once there is one."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        page = await client.get("/v1/recoveries", since=0)
        found[:] = [record for record in page["recoveries"] if record["kind"] == kind]
        return bool(found)

    await until(there, kind)
    return found[-1]


def test_a_lost_slot_that_a_spare_takes_is_one_recovery_with_three_times(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register("first")
        await client.beat("first", epoch=1, progress=progress(5, step=100))
        await client.register("spare")
        clock.advance(10.5)
        await client.register("spare")
        lost = await seen(client, "lease_lost")
        assert (lost["slot"], lost["agent_id"], lost["lost_s"], lost["taken_s"]) == (0, "first", START_S, None)
        clock.advance(9.6)
        await client.register("spare")
        taken = await seen(client, "spare_took_slot")
        assert (taken["agent_id"], taken["from_agent"], taken["taken_s"]) == ("spare", "first", START_S + 20.1)
        lease = await client.register("spare")
        assert (lease.slot, lease.resume.step if lease.resume else None) == (0, 100)
        clock.advance(2)
        epoch = lease.epoch - int(START_S)
        await client.beat("spare", epoch=epoch, progress=progress(0, step=100, phase="starting"))
        assert "trains_again" not in await kinds(client)
        clock.advance(1)
        await client.beat("spare", epoch=epoch, progress=progress(1, step=101))
        again = await seen(client, "trains_again")
        assert (again["lost_s"], again["taken_s"], again["first_step_s"]) == (START_S, START_S + 20.1, clock())
        assert [lost["recovery"], taken["recovery"], again["recovery"]] == [1, 1, 1]
        assert await client.metric('wadiloco_controller_recoveries_total{kind="spare_took_slot"}') == 1
        clock.advance(1)
        await client.beat("spare", epoch=epoch, progress=progress(2, step=102))
        assert (await kinds(client)).count("trains_again") == 1

    play(make_settings(tmp_path), clock, body)


def test_an_agent_that_comes_back_gets_its_slot_and_a_record(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(5, step=100))
        clock.advance(10.5)
        await seen(client, "lease_lost")
        lease = await client.register()
        back = await seen(client, "agent_returned")
        assert (back["slot"], back["agent_id"], back["taken_s"]) == (0, "island-0", START_S + 10.5)
        await client.beat(epoch=lease.epoch - int(START_S), progress=progress(6, step=101))
        assert (await seen(client, "trains_again"))["first_step_s"] == START_S + 10.5

    play(make_settings(tmp_path), clock, body)


def test_a_process_that_is_replaced_within_its_lease_is_a_recovery(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        clock.advance(4)
        await client.register(instance="second")
        record = await seen(client, "process_replaced")
        assert (record["lost_s"], record["taken_s"]) == (START_S, START_S + 4)

    play(make_settings(tmp_path), clock, body)


def test_a_restarted_worker_is_a_recovery_until_its_next_step(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(5, step=100))
        clock.advance(1)
        await client.beat(epoch=1, progress=progress(0, step=100, restarts=1, phase="starting"))
        assert (await seen(client, "worker_restarted"))["lost_s"] == START_S
        clock.advance(2)
        await client.beat(epoch=1, progress=progress(3, step=103, restarts=1))
        again = await seen(client, "trains_again")
        assert (again["lost_s"], again["first_step_s"]) == (START_S, START_S + 3)
        assert await kinds(client) == ["worker_restarted", "trains_again"]

    play(make_settings(tmp_path), clock, body)


def test_an_agent_that_leaves_and_one_that_never_held_a_slot(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register("first")
        await client.register("spare")
        await client.http.delete("/v1/agents/spare", params={"instance": "first"})
        assert await kinds(client) == []
        await client.http.delete("/v1/agents/first", params={"instance": "first"})
        assert await kinds(client) == ["left"]

    play(make_settings(tmp_path), clock, body)


def test_a_restart_of_the_controller_is_told_and_the_first_start_is_not(tmp_path: Path) -> None:
    clock = ManualClock()

    async def first(client: Client) -> None:
        await client.register()
        clock.advance(10.5)
        await seen(client, "lease_lost")

    async def second(client: Client) -> None:
        record = await seen(client, "controller_restarted")
        assert (record["slot"], record["lost_s"], record["taken_s"]) == (None, START_S, START_S + 15)
        await client.register()
        assert (await seen(client, "agent_returned"))["lost_s"] == START_S
        assert await kinds(client) == ["lease_lost", "controller_restarted", "agent_returned"]

    play(make_settings(tmp_path), clock, first)
    clock.advance(4.5)
    play(make_settings(tmp_path), clock, second)


def test_ids_go_on_rising_when_old_records_were_dropped(tmp_path: Path) -> None:
    clock = ManualClock()

    def run(body: Callable[[Client], Any]) -> None:
        play(make_settings(tmp_path, retention_s=60), clock, body)

    async def first(_: Client) -> None:
        clock.advance(1000)

    async def again(client: Client) -> None:
        await seen(client, "controller_restarted")
        clock.advance(1000)

    async def last(client: Client) -> None:
        async def is_third() -> bool:
            page = await client.get("/v1/recoveries", since=0)
            return (page["recoveries"][-1]["id"], page["next_since"]) == (3, 3)

        await until(is_third, "a third id")

    for body in (first, again, again):
        run(body)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.prune({"recoveries": clock()})
    journal.close()
    run(last)


def test_pages_go_on_where_they_stopped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    for number in range(1, 6):
        journal.append("recoveries", recovery_row(recovery(number)))
    journal.close()
    reader = JournalReader(tmp_path / "j.sqlite")
    assert [record.id for record in reader.page("recoveries", since=2, limit=2)] == [3, 4]
    assert reader.last_id("recoveries") == 5
    assert reader.last_of_page("recoveries", since=2, limit=2) == 4
    assert reader.last_of_page("recoveries", since=9, limit=2) == 9


@pytest.mark.parametrize("query", ["since=-1", "limit=0", "limit=99999999"])
def test_a_page_that_cannot_be_is_refused(tmp_path: Path, query: str) -> None:
    async def body(client: Client) -> None:
        assert (await client.http.get(f"/v1/recoveries?{query}")).status_code == 422

    play(make_settings(tmp_path), ManualClock(), body)
