"""A request that is given up leaves its connection to the next one, whenever that happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from service.deadline import deadline, unless

MOMENTS = 60
"""Turns of the event loop; a request takes some twenty."""
ONE_CONNECTION = httpx.Limits(max_connections=1)
TIMES = httpx.Timeout(60.0, pool=10.0)
"""Only a wait for the connection ends soon: a machine may stand still for some seconds."""


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """A server whose answers come in two parts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + b"x" * 1000)
                await asyncio.sleep(0)
                writer.write(b"x" * 1000)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def after(turns: int, act: Callable[[], None]) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    act()


async def within_a_deadline(http: httpx.AsyncClient, turns: int) -> bool:
    with deadline(60.0) as scope:
        ending = asyncio.create_task(after(turns, scope.cancel))
        answer = await http.get("/")
        await ending
        return answer.is_success
    return False


async def unless_an_event_comes(http: httpx.AsyncClient, turns: int) -> bool:
    event = asyncio.Event()
    ending = asyncio.create_task(after(turns, event.set))
    answer = await unless(event, http.get("/"))
    await ending
    return answer is not None


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("ask", [within_a_deadline, unless_an_event_comes])
def test_a_request_that_is_given_up_at_any_moment_leaves_its_connection_to_the_next(
    ask: Callable[[httpx.AsyncClient, int], Awaitable[bool]], is_first: bool
) -> None:
    async def run() -> None:
        answered = []
        async with served() as url:
            for turns in range(MOMENTS):
                async with httpx.AsyncClient(base_url=url, timeout=TIMES, limits=ONE_CONNECTION) as http:
                    if not is_first:
                        await http.get("/")
                    answered.append(await ask(http, turns))
                    # Waits for the only connection, in vain where that was lost.
                    assert (await http.get("/")).is_success, turns
        assert set(answered) == {True, False}

    asyncio.run(asyncio.wait_for(run(), 120))


def test_what_is_done_in_time_is_the_result() -> None:
    async def run() -> None:
        never = asyncio.Event()
        assert await unless(never, asyncio.sleep(0, "done")) == "done"
        with deadline(10.0):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError), deadline(-1.0):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_an_error_of_the_work_is_raised_and_an_event_that_came_before_gives_it_up() -> None:
    async def run() -> None:
        async def fail() -> None:
            raise ValueError("bad")

        with pytest.raises(ValueError, match="bad"):
            await unless(asyncio.Event(), fail())
        came = asyncio.Event()
        came.set()
        assert await unless(came, asyncio.sleep(30, "late")) is None

    asyncio.run(run())
