"""Health, token, limits and errors of the application that every service starts from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter
from pydantic import SecretStr

from service.app import build_app
from service.errors import ConflictError
from service.settings import ServiceSettings
from service.tasks import Background


def test_metrics_are_told_whatever_version_is_asked_for() -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=abc"})

    assert asyncio.run(ask()).status_code == 200


def make_app(settings: ServiceSettings | None = None, *, ready: str | None = None, dying: bool = False) -> FastAPI:
    registry = CollectorRegistry()
    Counter("wadiloco_probe_things_total", "Things.", registry=registry).inc()

    async def die() -> None:
        raise RuntimeError("boom")

    async def live(tasks: Background) -> None:
        await tasks.exit.wait()

    @asynccontextmanager
    async def lifespan(_: FastAPI, tasks: Background) -> AsyncIterator[None]:
        tasks.start("body", die if dying else lambda: live(tasks))
        yield

    app = build_app(
        settings or ServiceSettings(),
        lifespan=lifespan,
        registry=registry,
        readiness=lambda: ready,
        description="A probe.",
        max_body_bytes=1000,
    )

    @app.get("/v1/conflict")
    async def conflict() -> None:
        raise ConflictError("epoch 3 is over", field="epoch", remedy="register again")

    @app.post("/v1/echo")
    async def echo(body: dict[str, int]) -> dict[str, int]:
        return body

    @app.post("/v1/stream")
    async def stream(request: Request) -> int:
        return sum([len(chunk) async for chunk in request.stream()])

    return app


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://probe") as client,
    ):
        yield client


def get(app: FastAPI, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(app) as client:
            await asyncio.sleep(0)
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def post(app: FastAPI, path: str, content: bytes | AsyncIterator[bytes]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(app) as client:
            return await client.post(path, content=content, headers={"Content-Type": "application/json"})

    return asyncio.run(run())


def test_health_is_ok_while_the_tasks_run() -> None:
    assert get(make_app(), "/healthz").json()["status"] == "ok"


def test_health_names_a_dead_task() -> None:
    answer = get(make_app(dying=True), "/healthz")
    assert answer.status_code == 503
    assert answer.json()["failures"] == {"body": "RuntimeError: boom"}


def test_readiness_says_why_not() -> None:
    assert get(make_app(), "/readyz").status_code == 200
    answer = get(make_app(ready="no journal"), "/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no journal")


def test_metrics_are_prometheus_text() -> None:
    answer = get(make_app(), "/metrics")
    assert "wadiloco_probe_things_total 1.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_token_guards_v1_and_nothing_else() -> None:
    app = make_app(ServiceSettings(token=SecretStr("s3cret")))
    assert get(app, "/v1/conflict").status_code == 401
    assert get(app, "/v1/conflict", {"Authorization": "Bearer wrong"}).status_code == 401
    assert get(app, "/v1/conflict", {"Authorization": "Bearer s3cret"}).status_code == 409
    for path in ("/healthz", "/readyz", "/metrics", "/docs"):
        assert get(app, path).status_code == 200


def test_errors_name_field_and_remedy() -> None:
    assert get(make_app(), "/v1/conflict").json() == {
        "error": "ConflictError",
        "message": "epoch 3 is over",
        "field": "epoch",
        "remedy": "register again",
    }


def test_invalid_bodies_name_the_field() -> None:
    answer = post(make_app(), "/v1/echo", b'{"a": "x"}')
    assert answer.status_code == 422
    assert answer.json()["field"] == "body.a"


def test_large_bodies_are_refused_announced_or_not() -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    assert post(make_app(), "/v1/echo", b"x" * 2000).status_code == 413
    assert post(make_app(), "/v1/stream", unannounced()).status_code == 413
    assert post(make_app(), "/v1/stream", b"x" * 1000).json() == 1000
