"""When a lost connection means a lost agent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from controller.death_watch import DeathWatch, refuses
from diloco.schema import AgentStatus
from service.errors import ConflictError
from service.server import bind
from service.settings import ServiceSettings
from tests.controller.helpers import Client, ManualClock, make_settings, play, until


class Listener:
    """An agent's HTTP service, as far as it is asked who it is."""

    def __init__(self, instance: str) -> None:
        told = AgentStatus(
            agent_id="a",
            instance=instance,
            node="n",
            slot=0,
            epoch=1,
            run_id=None,
            controller_reachable=True,
            synchronizer_url=None,
            worker_pid=None,
            worker_ready=False,
            num_parameters=None,
            restarts=0,
            unacknowledged_syncs=0,
        ).model_dump_json()
        self._answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(told)}\r\nConnection: close\r\n\r\n{told}".encode()
        self._socket = bind("127.0.0.1", 0)
        self._socket.listen()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(self._answer)

    def close(self) -> None:
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(10)
        self._socket.close()


def messages(disconnected: asyncio.Event) -> Receive:
    async def receive() -> dict[str, Any]:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return receive


def watch_of(client: Client) -> DeathWatch:
    return DeathWatch(client.controller, client.loop, ServiceSettings())


async def lose_connection(client: Client, watch: DeathWatch, *, instance: str = "first") -> None:
    """A long poll of the agent ``a`` that breaks."""
    disconnected = asyncio.Event()
    asking = client.controller.directives("a", instance=instance, after=10**9, wait_s=30)
    polling = asyncio.create_task(watch.while_connected(messages(disconnected), "a", instance, asking))
    await asyncio.sleep(0)
    disconnected.set()
    with pytest.raises(ClientDisconnect):
        await polling


async def reached(watch: DeathWatch, ending: asyncio.Event) -> asyncio.Task[None]:
    greeting = asyncio.create_task(watch.greet_new(ending))

    async def there() -> bool:
        return bool(watch._reached)

    await until(there, "the agent is reached")
    return greeting


def run(tmp_path: Path, body: Callable[[Client, DeathWatch, Listener], Coroutine[Any, Any, None]]) -> None:
    async def main(client: Client) -> None:
        listener = Listener("first")
        try:
            await client.register("a", url=listener.url)
            await client.register("spare")
            await body(client, watch_of(client), listener)
        finally:
            listener.close()

    play(make_settings(tmp_path), ManualClock(), main)


async def holder_of_slot(client: Client) -> str | None:
    holder = client.controller.state.registry.island(0)
    return None if holder is None else holder.agent_id


def test_an_agent_whose_address_refuses_is_given_up_and_a_spare_has_its_slot(tmp_path: Path) -> None:
    async def body(client: Client, watch: DeathWatch, listener: Listener) -> None:
        ending = asyncio.Event()
        watch._to_greet.put_nowait(("a", "first"))
        greeting = await reached(watch, ending)
        listener.close()
        await lose_connection(client, watch)
        assert await holder_of_slot(client) == "spare"
        ending.set()
        await greeting

    run(tmp_path, body)


def test_an_agent_that_still_listens_has_its_lease(tmp_path: Path) -> None:
    async def body(client: Client, watch: DeathWatch, _: Listener) -> None:
        ending = asyncio.Event()
        watch._to_greet.put_nowait(("a", "first"))
        greeting = await reached(watch, ending)
        await lose_connection(client, watch)
        assert await holder_of_slot(client) == "a"
        ending.set()
        await greeting

    run(tmp_path, body)


def test_an_agent_that_was_never_reached_is_not_given_up_for_an_address_that_refuses(tmp_path: Path) -> None:
    async def body(client: Client, watch: DeathWatch, listener: Listener) -> None:
        listener.close()
        await lose_connection(client, watch)
        assert await holder_of_slot(client) == "a"

    run(tmp_path, body)


def test_another_process_at_the_address_is_not_the_agent(tmp_path: Path) -> None:
    async def body(client: Client, watch: DeathWatch, listener: Listener) -> None:
        other = Listener("someone else")
        await client.register("b", url=other.url)
        watch._to_greet.put_nowait(("b", "first"))
        watch._to_greet.put_nowait(("a", "first"))
        ending = asyncio.Event()
        greeting = await reached(watch, ending)
        assert set(watch._reached) == {"a"}
        ending.set()
        await greeting
        other.close()

    run(tmp_path, body)


def test_it_remembers_nobody_whom_the_registry_does_not_know(tmp_path: Path) -> None:
    async def body(client: Client, watch: DeathWatch, _: Listener) -> None:
        connected = messages(asyncio.Event())
        for number in range(20):
            stranger = f"stranger-{number}"
            asking = client.controller.directives(stranger, instance="first", after=0, wait_s=0)
            with pytest.raises(ConflictError):
                await watch.while_connected(connected, stranger, "first", asking)
        watch._polls.update({f"gone-{number}": 1 for number in range(20)})
        asking = client.controller.directives("a", instance="first", after=10**9, wait_s=0)
        await watch.while_connected(connected, "a", "first", asking)
        assert set(watch._polls) == set(watch._greeted) == {"a"}

    run(tmp_path, body)


def test_only_a_refusal_is_one() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert asyncio.run(refuses(f"http://127.0.0.1:{port}"))  # bound, and does not listen
        listener.listen()
        assert not asyncio.run(refuses(f"http://127.0.0.1:{port}"))
    assert not asyncio.run(refuses("http://a-host-that-is-none.invalid:9"))
