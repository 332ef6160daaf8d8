"""Health, token, limits and errors of the application that every service starts from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
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


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"{", "application/json", "is no JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"h=1", "application/json", "is no JSON: Expecting value at character 0"),
        (b'{"h": 1}', "text/plain", "Input should be a valid dictionary"),
        (b"\xff\xfe\x00", "application/json", "There was an error parsing the body"),
        (b"", "application/json", "Field required"),
    ],
)
def test_a_body_that_is_no_json_is_told_what_to_send(body: bytes, content_type: str, message: str) -> None:
    async def post() -> httpx.Response:
        async with client_of(make_app()) as client:
            return await client.post("/v1/echo", content=body, headers={"Content-Type": content_type})

    answer = asyncio.run(post())
    assert answer.status_code in {400, 422}
    assert answer.json()["message"].startswith(message)
    assert answer.json()["field"] == "body"
    assert "send JSON in UTF-8, with Content-Type: application/json" in answer.json()["remedy"]


@pytest.mark.parametrize(("method", "path", "field"), [("GET", "/nowhere", "path"), ("DELETE", "/v1/echo", "method")])
def test_what_is_not_there_is_told_with_field_and_remedy(method: str, path: str, field: str) -> None:
    async def ask() -> httpx.Response:
        async with client_of(make_app()) as client:
            return await client.request(method, path)

    answer = asyncio.run(ask())
    assert answer.json()["field"] == field
    assert "see /docs" in answer.json()["remedy"]
    assert ("allow" in answer.headers) == (field == "method")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/v1/lines", "/v1/conflict", "/nowhere"])
def test_head_is_answered_as_get_is_without_the_body(path: str) -> None:
    app = make_app()
    sent = 0

    async def lines() -> AsyncIterator[str]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield "line\n"

    @app.get("/v1/lines")
    async def get_lines() -> StreamingResponse:
        return StreamingResponse(lines(), media_type="text/csv")

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with client_of(app) as client:
            await asyncio.sleep(0)
            head = await client.head(path)
            assert sent <= 1  # what follows is not made
            return head, await client.get(path)

    head, get = asyncio.run(ask())
    assert head.content == b""
    assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])


def test_large_bodies_are_refused_announced_or_not() -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    assert post(make_app(), "/v1/echo", b"x" * 2000).status_code == 413
    assert post(make_app(), "/v1/stream", unannounced()).status_code == 413
    assert post(make_app(), "/v1/stream", b"x" * 1000).json() == 1000
