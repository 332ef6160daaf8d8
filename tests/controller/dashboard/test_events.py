"""The event stream: snapshot and ticks, many clients, slow ones, resumption, limits, the token, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from controller.app import build_controller_app
from controller.dashboard import service, stream
from controller.dashboard.feed import KEPT_TICKS
from controller.dashboard.picture import take_picture
from controller.dashboard.service import Dashboard
from tests.controller.dashboard.sse import EventClient, following
from tests.controller.helpers import Client, ManualClock, make_settings, progress, running_app, sample, until

Body = Callable[[Client, FastAPI, Dashboard], Awaitable[None]]


def play(tmp_path: Path, body: Body, clock: ManualClock | None = None, **settings: Any) -> None:
    """Run ``body`` against a controller in this process, whose dashboard ticks only when it is told to."""

    async def main() -> None:
        app = build_controller_app(make_settings(tmp_path, **settings), clock=clock or ManualClock())
        async with running_app(app) as client:
            await body(client, app, app.state.dashboard)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def no_own_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "EVENTS_PERIOD_S", 3600.0)


async def until_followed(dashboard: Dashboard, num_clients: int) -> None:
    async def followed() -> bool:
        return dashboard.feed.num_clients == num_clients

    await until(followed, f"{num_clients} clients")


def test_a_snapshot_comes_first_and_then_only_what_has_changed(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        lease = await client.register(server_id="vllm-0")
        samples = [sample("vllm-0", running=3, waiting=1), sample("vllm-1")]
        await client.http.post("/v1/samples", json={"samples": samples})
        async with following(app) as reader:
            first = await reader.next()
            assert reader.headers["content-type"].startswith("text/event-stream")
            assert reader.headers["cache-control"] == "no-store"
            assert first.name == "snapshot"
            assert [row["server_id"] for row in first.data["servers"]] == ["vllm-0", "vllm-1"]
            assert (first.data["servers"][0]["running"], first.data["servers"][0]["kv_usage_frac"]) == (3, None)
            assert first.data["islands"][0]["epoch"] == lease.epoch
            assert first.data["islands"][0]["step"] is None
            assert first.data["run"]["run_id"] == lease.run_id
            clock.advance(1)
            await client.http.post("/v1/samples", json={"samples": [sample("vllm-1", t_s=clock(), running=7)]})
            await client.beat(epoch=1, progress=progress(4))
            await dashboard.tick()
            second = await reader.next()
            assert second.name == "tick"
            assert [(row["server_id"], row["running"]) for row in second.data["servers"]] == [("vllm-1", 7)]
            assert [(row["h"], row["current"]) for row in second.data["islands"]] == [(4, True)]
            assert second.data["run"] is None
            clock.advance(10)
            await dashboard.tick()
            third = await reader.next()
            assert [row["known"] for row in third.data["servers"]] == [False, False]
            assert third.data["totals"]["servers_unknown"] == 2

    play(tmp_path, body, clock)


def test_decisions_rounds_and_budget_reach_the_page(tmp_path: Path) -> None:
    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        await client.register()
        async with following(app) as reader:
            await reader.next()
            await client.beat(epoch=1, progress=progress(10))

            async def directed() -> bool:
                return bool((await client.get("/v1/rounds"))["rounds"])

            await until(directed, "a round")
            await dashboard.tick()
            tick = await reader.next()
            (round_,) = tick.data["rounds"]
            assert (round_["outcome"], round_["duration_s"], round_["slots_applied"]) == ("open", None, [])
            reasons = [row["reason"] for row in tick.data["decisions"]]
            assert "fixed_h_reached" in reasons
            due = next(row for row in tick.data["decisions"] if row["reason"] == "fixed_h_reached")
            assert (due["action"], due["terms"]["h"], due["round"]) == ("sync", 10, 0)
            await client.http.put("/v1/budget", json={"outer_syncs": 5})
            await dashboard.tick()
            assert (await reader.next()).data["budget"]["status"]["remaining"] == 5

    play(tmp_path, body)


def test_decisions_from_before_a_restart_are_there_again(tmp_path: Path) -> None:
    async def decide(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async def decided() -> bool:
            return client.controller.state.last_decision_id >= 3

        await until(decided, "decisions")

    async def look(_: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as reader:
            (row,) = (await reader.next()).data["decisions"]
            assert (row["first_id"], row["reason"]) == (1, "no_islands")
            assert row["count"] >= 3

    play(tmp_path, decide)
    play(tmp_path, look)


def test_all_clients_get_the_same_bytes_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def counted(controller: Any) -> Any:
        looks.append(controller)
        return take_picture(controller)

    monkeypatch.setattr(service, "take_picture", counted)

    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        await dashboard.tick()
        assert looks == []  # Nobody looks.
        async with AsyncExitStack() as stack:
            readers = [await stack.enter_async_context(following(app)) for _ in range(5)]
            firsts = [await reader.next() for reader in readers]
            assert {first.name for first in firsts} == {"snapshot"}
            before = len(looks)
            await client.register()
            await dashboard.tick()
            ticks = [await reader.next() for reader in readers]
            assert len(looks) == before + 1
            assert all(tick == ticks[0] for tick in ticks)

    play(tmp_path, body)


def test_a_slow_client_is_bounded_and_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as slow, following(app) as fast:
            await slow.next()
            await fast.next()
            slow.takes.clear()
            for number in range(KEPT_TICKS + 10):
                await client.http.put("/v1/budget", json={"outer_syncs": number})
                await dashboard.tick()
                # The others do not wait for it.
                assert (await fast.next()).data["budget"]["status"]["remaining"] == number
            assert len(dashboard.feed._ticks) == KEPT_TICKS
            slow.takes.set()
            first = await slow.next()  # The one that was already on its way.
            assert (first.name, first.data["budget"]["status"]["remaining"]) == ("tick", 0)
            second = await slow.next()
            assert second.name == "snapshot"
            assert second.data["budget"]["status"]["remaining"] == KEPT_TICKS + 9
            assert await client.metric("wadiloco_controller_events_skipped_total") == 1

    play(tmp_path, body)


def test_a_client_that_takes_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_DEADLINE_S", 0.05)

    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as hung:
            await hung.next()
            hung.takes.clear()
            await dashboard.tick()
            await until_followed(dashboard, 0)
            assert await client.metric("wadiloco_controller_events_dropped_total") == 1

    play(tmp_path, body)


def test_who_comes_back_soon_gets_what_it_missed_and_who_comes_back_late_a_snapshot(tmp_path: Path) -> None:
    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as reader:
            last = await reader.next()
        await until_followed(dashboard, 0)
        await client.register()
        async with following(app, headers={"Last-Event-ID": last.id}) as again:
            missed = await again.next()
            assert missed.name == "tick"
            assert [row["agent_id"] for row in missed.data["islands"]] == ["island-0"]
            for _ in range(KEPT_TICKS + 1):
                await dashboard.tick()
        async with following(app, headers={"Last-Event-ID": last.id}) as late:
            assert (await late.next()).name == "snapshot"

    play(tmp_path, body)


@pytest.mark.parametrize("event_id", ["", "7", "deadbeef-0", "-1", "x-999999999999999999999999", "0-\x80"])
def test_the_id_of_another_process_or_nonsense_begins_anew(tmp_path: Path, event_id: str) -> None:
    async def body(_: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app, headers={"Last-Event-ID": event_id}) as reader:
            assert (await reader.next()).name == "snapshot"

    play(tmp_path, body)


def test_an_id_from_the_future_begins_anew(tmp_path: Path) -> None:
    async def body(_: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as reader:
            boot = (await reader.next()).id.partition("-")[0]
        async with following(app, headers={"Last-Event-ID": f"{boot}-1000"}) as reader:
            assert (await reader.next()).name == "snapshot"

    play(tmp_path, body)


def test_a_quiet_stream_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.01)

    async def body(_: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as reader:
            await reader.next()

            async def beaten() -> bool:
                return len(reader.comments) >= 2

            await until(beaten, "heartbeats")
            assert set(reader.comments) == {": heartbeat"}

    play(tmp_path, body)


def test_clients_over_the_limit_are_told_to_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CLIENTS", 2)

    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as one, following(app) as two:
            await one.next()
            await two.next()
            refused = await client.http.get("/v1/events")
            assert refused.status_code == 429
            assert refused.json()["remedy"]
            assert await client.metric("wadiloco_controller_events_refused_total") == 1
        await until_followed(dashboard, 0)
        async with following(app) as three:
            assert (await three.next()).name == "snapshot"

    play(tmp_path, body)


def test_the_end_of_the_process_ends_every_stream_even_one_that_takes_nothing(tmp_path: Path) -> None:
    readers: list[EventClient] = []

    async def body(_: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as good, following(app) as hung:
            readers.extend((good, hung))
            await good.next()
            await hung.next()
            hung.takes.clear()
            app.state.tasks.exit.set()
            await until_followed(dashboard, 0)
            assert good.ended

    play(tmp_path, body)
    assert [reader.ended for reader in readers] == [True, False]


def test_the_stream_needs_the_token_and_the_page_does_not(tmp_path: Path) -> None:
    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        refused = await client.http.get("/v1/events")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/", "/dashboard/app.js"):
            assert (await client.http.get(path)).status_code == 200
        async with following(app, headers={"Authorization": "Bearer secret"}) as reader:
            assert (await reader.next()).name == "snapshot"

    play(tmp_path, body, token="secret")  # noqa: S106


def test_a_picture_that_fails_is_counted_and_the_next_tick_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: Client, app: FastAPI, dashboard: Dashboard) -> None:
        async with following(app) as reader:
            await reader.next()

            def broken(_: object) -> Any:
                raise ArithmeticError("broken")

            monkeypatch.setattr(service, "take_picture", broken)
            await dashboard.tick()
            assert await client.metric("wadiloco_controller_events_failures_total") == 1
            monkeypatch.setattr(service, "take_picture", take_picture)
            await dashboard.tick()
            assert (await reader.next()).name == "tick"

    play(tmp_path, body)
    assert "picture failed" in caplog.text
