"""A controller in this process without its lead: what it still answers, what it refuses, and what it goes on with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import psycopg
import pytest

from controller.app import build_controller_app
from controller.clock import steady_clock
from controller.config import ControllerSettings
from controller.database_url import parse_database_url
from controller.journal_postgres import LOCK_CLASS
from service.errors import ConfigError
from tests.controller import helpers
from tests.controller.conftest import DatabasePlace
from tests.controller.helpers import Client, progress, registration, sample, until


def settings_for(database: DatabasePlace, **values: object) -> ControllerSettings:
    fast = {"port": 0, "num_slots": 1, "policy": "fixed_h", "policy_params": {"h": 10}, "min_h": 2, "tick_s": 0.02}
    return ControllerSettings.model_validate(
        {"journal": parse_database_url(database.url), "failover_s": 1.0, **fast, **values}
    )


def running(settings: ControllerSettings) -> AbstractAsyncContextManager[Client]:
    return helpers.running(settings, steady_clock())


def play(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(main())


async def led(client: Client) -> bool:
    return client.controller.leadership.leads


class Usurper:
    """Ends every session of the controllers and holds the lock of the leader."""

    def __init__(self, database: DatabasePlace) -> None:
        self._connection = psycopg.connect(database.url, autocommit=True)

    def take(self) -> None:
        while True:
            self._connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'wadiloco controller'"
            )
            found = self._connection.execute("SELECT pg_try_advisory_lock(%s, 1)", (LOCK_CLASS,)).fetchone()
            if found == (True,):
                return

    def give_back(self) -> None:
        self._connection.close()


def test_without_the_lead_it_decides_nothing_and_with_it_again_goes_on(database: DatabasePlace) -> None:
    async def body() -> None:
        async with running(settings_for(database)) as client:
            await until(lambda: led(client), "the lead")
            lease = await client.register()
            state = client.controller.state
            usurper = Usurper(database)
            await asyncio.to_thread(usurper.take)
            poll = asyncio.create_task(
                client.http.get(
                    "/v1/agents/island-0/directives",
                    params={"instance": "first", "after": lease.directive_seq, "wait_s": 30},
                )
            )

            async def refused() -> bool:
                answer = await client.http.post("/v1/samples", json={"samples": [sample(t_s=time.time())]})
                return answer.status_code == 503

            await until(refused, "a refusal")
            # Whoever waits for a decision is let go, to ask another controller.
            await asyncio.wait_for(poll, 5)
            decided = state.last_decision_id
            for _ in range(5):
                await asyncio.sleep(0.05)
                assert state.last_decision_id == decided
            assert client.controller.has_state
            assert await client.metric("wadiloco_controller_leading") == 0
            assert len((await client.get("/v1/fleet"))["islands"]) == 1
            assert (await client.http.get("/healthz")).status_code == 200
            # Ranks that met at two controllers would not meet.
            assert (await client.http.get("/v1/store/1/a")).status_code == 503
            usurper.give_back()
            await until(lambda: led(client), "the lead again")
            assert client.controller.state is state
            assert await client.metric("wadiloco_controller_leader_term") == 1

            async def goes_on() -> bool:
                return state.last_decision_id > decided

            await until(goes_on, "decisions again")

    play(body)


def test_a_lead_that_another_had_meanwhile_is_begun_from_the_journal(database: DatabasePlace) -> None:
    async def body() -> None:
        async with running(settings_for(database)) as client:
            await until(lambda: led(client), "the lead")
            await client.register()
            before = client.controller.state
            usurper = Usurper(database)
            await asyncio.to_thread(usurper.take)
            database.execute("UPDATE leader SET term = term + 1, batch = 0, holder = 'somebody'")
            usurper.give_back()

            async def restored() -> bool:
                return await led(client) and client.controller.state is not before

            await until(restored, "another state")
            assert client.controller.leadership.term == 3
            islands = await client.get("/v1/islands")
            assert [(one["agent_id"], one["slot"], one["alive"]) for one in islands] == [("island-0", 0, True)]
            answer = await client.http.post("/v1/agents", json=registration().model_dump(mode="json"))
            epoch = answer.json()["epoch"]
            beat = {
                "instance": "first",
                "epoch": epoch,
                "t_s": time.time(),
                "progress": progress(10).model_dump(mode="json"),
            }
            (await client.http.post("/v1/agents/island-0/heartbeat", json=beat)).raise_for_status()
            page = await client.directives(after=0, wait_s=10)
            assert [one["kind"] for one in page["directives"]] == ["sync"]

    play(body)


def test_a_standby_of_another_run_is_refused_at_its_start(database: DatabasePlace) -> None:
    async def body() -> None:
        async with running(settings_for(database, run_id="one")) as client:
            await until(lambda: led(client), "the lead")
            await client.register()
            with pytest.raises(ConfigError, match="belongs to run one"):
                build_controller_app(settings_for(database, run_id="two"))

    play(body)


def test_a_state_that_cannot_be_restored_is_a_dead_task_and_not_a_lead(database: DatabasePlace) -> None:
    database.execute("INSERT INTO agents VALUES ('island-0', '{\"from\": \"a newer version\"}')")

    async def body() -> None:
        async with running(settings_for(database)) as client:

            async def unhealthy() -> bool:
                return (await client.http.get("/healthz")).status_code == 503

            await until(unhealthy, "the dead task")
            assert "cannot read" in (await client.http.get("/healthz")).json()["failures"]["lead"]
            assert not await led(client)

    play(body)
