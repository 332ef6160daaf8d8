"""The store over HTTP: what waits, what is refused."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from service.app import build_app
from service.settings import ServiceSettings
from service.store import MAX_VALUE_BYTES
from service.store_api import SharedStore, build_store_router
from service.tasks import Background

KEY = "/v1/store/3/rank0//pair/1"


def play(body: Callable[[httpx.AsyncClient, SharedStore], Awaitable[None]], *, token: str | None = None) -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI, __: Background) -> AsyncIterator[None]:
        yield

    async def main() -> None:
        store = SharedStore()
        app = build_app(
            ServiceSettings(token=None if token is None else SecretStr(token)),
            lifespan=lifespan,
            registry=CollectorRegistry(),
            readiness=lambda: None,
            description="A store.",
        )
        app.include_router(build_store_router(store))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://store") as client:
            await body(client, store)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (of the tested code, which has no event for it)
        await asyncio.sleep(0)


def encoded(value: bytes) -> str:
    return b64encode(value).decode()


def test_values_are_raw_bytes_under_keys_with_slashes() -> None:
    async def body(client: httpx.AsyncClient, _: SharedStore) -> None:
        assert (await client.get(KEY)).status_code == 204
        assert (await client.head(KEY)).status_code == 204
        assert (await client.put(KEY, content=bytes(range(256)))).status_code == 204
        assert (await client.get(KEY)).content == bytes(range(256))
        assert (await client.get("/v1/store/3/rank0/pair/1")).status_code == 204
        assert (await client.get(KEY, params={"group": "run-1/slot-2"})).status_code == 204
        assert (await client.head(KEY)).status_code == 200
        assert (await client.get("/v1/store/3")).json() == {"num_keys": 1}
        assert (await client.delete(KEY)).json() == {"deleted": True}
        assert (await client.delete(KEY)).json() == {"deleted": False}

    play(body)


def test_counters_and_comparisons() -> None:
    async def body(client: httpx.AsyncClient, _: SharedStore) -> None:
        assert (await client.post(KEY, json={"add": 2})).json() == {"value": encoded(b"2")}
        change = {"expected": encoded(b"2"), "desired": encoded(b"\xff")}
        assert (await client.post(KEY, json=change)).json() == {"value": encoded(b"\xff")}
        for wrong in ({}, {"add": 1, "expected": ""}, {"expected": ""}, {"more": 1}):
            assert (await client.post(KEY, json=wrong)).status_code == 422

    play(body)


def test_a_wait_ends_with_the_value_or_with_its_epoch_or_with_the_process() -> None:
    async def body(client: httpx.AsyncClient, store: SharedStore) -> None:
        async def waiting() -> asyncio.Task[httpx.Response]:
            before = store._num_waiting
            task = asyncio.create_task(client.get(KEY, params={"wait_s": 30}))
            await until(lambda: store._num_waiting > before)
            return task

        first, second = await waiting(), await waiting()
        await client.put("/v1/store/3/another", content=b"")
        await client.put(KEY, content=b"here")
        assert [(await task).content for task in (first, second)] == [b"here", b"here"]
        await client.delete(KEY)
        fenced = await waiting()
        await client.put("/v1/store/4/a", content=b"")
        assert (await fenced).status_code == 409
        stopped = asyncio.create_task(client.get("/v1/store/4/b", params={"wait_s": 30}))
        await until(lambda: store._num_waiting > 0)
        store.close()
        assert (await stopped).status_code == 204
        assert (await client.get("/v1/store/4/b", params={"wait_s": 30})).status_code == 204

    play(body)


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_a_wait_ends_as_soon_as_anybody_has_a_newer_epoch(method: str) -> None:
    async def body(client: httpx.AsyncClient, store: SharedStore) -> None:
        waiting = asyncio.create_task(client.get(KEY, params={"wait_s": 30}))
        await until(lambda: store._num_waiting == 1)
        await client.request(method, KEY.replace("/3/", "/4/"))
        async with asyncio.timeout(15):
            assert (await waiting).status_code == 409

    play(body)


def test_what_is_too_long_or_without_the_token_is_refused() -> None:
    async def body(client: httpx.AsyncClient, _: SharedStore) -> None:
        assert (await client.get(KEY)).status_code == 401
        client.headers["Authorization"] = "Bearer s3cret"
        answer = await client.put(KEY, content=bytes(MAX_VALUE_BYTES + 1))
        assert (answer.status_code, answer.json()["field"]) == (422, "value")
        assert (await client.put(KEY, content=bytes(MAX_VALUE_BYTES))).status_code == 204
        assert (await client.put(f"/v1/store/3/{'k' * 600}", content=b"")).status_code == 422
        assert (await client.put("/v1/store/-1/a", content=b"")).status_code == 422

    play(body, token="s3cret")  # noqa: S106
