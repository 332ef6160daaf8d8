"""The HTTP application that every service starts from: health, metrics, errors as JSON, bearer token, body limit.

``/healthz`` says that the process and its own tasks are alive, ``/readyz`` that it has what it needs; both stay open,
as do ``/metrics`` and ``/docs``. Everything under ``/v1`` needs the token when one is configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.admission import Admission, AdmissionCollector
from service.answers import error_response
from service.docs import build_docs
from service.errors import WadilocoError
from service.settings import ServiceSettings
from service.tasks import Background, background

DEFAULT_MAX_BODY_BYTES = 8 << 20
BODY_IDLE_S = 30.0
"""Without a byte of a body that was announced."""
BODY_DEADLINE_S = 600.0
"""For a whole body: the largest, over the slowest link that is worth training over."""
NO_LARGER_BODIES: Mapping[str, int] = {}

# A `_created` series per counter tells the process's start over and over.
disable_created_metrics()  # type: ignore[no-untyped-call]

Lifespan = Callable[[FastAPI, Background], AbstractAsyncContextManager[None]]
Readiness = Callable[[], str | None]
"""Returns why the service is not ready, or None when it is."""


def build_app(
    settings: ServiceSettings,
    *,
    lifespan: Lifespan,
    registry: CollectorRegistry,
    readiness: Readiness,
    description: str,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    larger_bodies: Mapping[str, int] = NO_LARGER_BODIES,
) -> FastAPI:
    """An application whose background tasks live as long as it does.

    ``lifespan(app, tasks)`` is entered with a `Background`; ``app.state.tasks`` holds it while the application runs.
    ``app.state.admission`` bounds its connections where `service.server` serves it.
    """

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        async with background() as tasks:
            app.state.tasks = tasks
            async with lifespan(app, tasks):
                yield
                # Owners close their clients only after their tasks have stopped.
                await tasks.stop()

    app = FastAPI(
        title=f"WA-DiLoCo {settings.service}",
        version=package_version(),
        description=description,
        lifespan=run,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(build_docs())
    app.state.tasks = None
    app.state.admission = Admission(settings.connection_limit)
    registry.register(AdmissionCollector(app.state.admission, settings.service))
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, larger=larger_bodies)
    app.add_middleware(BodyUntilExit)
    app.add_middleware(HeadAsGet)
    if settings.token is not None:
        app.add_middleware(BearerToken, token=settings.token.get_secret_value())
    app.add_exception_handler(WadilocoError, answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)

    _add_health_routes(app, registry=registry, readiness=readiness)
    return app


def _add_health_routes(app: FastAPI, *, registry: CollectorRegistry, readiness: Readiness) -> None:
    started_s = time.monotonic()

    @app.get("/healthz", tags=["health"], summary="Alive: the process and its own tasks run")
    async def healthz() -> Response:
        tasks: Background | None = app.state.tasks
        failures = tasks.failures if tasks is not None else {}
        body = {
            "status": "dead task" if failures else "ok",
            "failures": failures,
            "uptime_s": time.monotonic() - started_s,
        }
        return JSONResponse(body, status_code=503 if failures else 200)

    @app.get("/readyz", tags=["health"], summary="Ready: it has what it needs")
    async def readyz() -> Response:
        reason = readiness()
        return JSONResponse({"ready": reason is None, "reason": reason}, status_code=503 if reason else 200)

    @app.get("/metrics", tags=["health"], summary="Prometheus metrics")
    async def metrics(request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        return Response(encode(registry), headers={"Content-Type": content_type})


def package_version() -> str:
    try:
        return version("wadiloco")
    except PackageNotFoundError:
        return "0+unknown"


async def answer_error(_: Request, exc: Exception) -> Response:
    """What a `WadilocoError` becomes over HTTP."""
    assert isinstance(exc, WadilocoError)
    return error_response(exc.http_status, type(exc).__name__, exc.message, exc.field, exc.remedy)


async def _answer_invalid(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return error_response(
            422, "InputError", f"is no JSON: {why} at character {first['loc'][-1]}", "body", SEND_JSON
        )
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return error_response(422, "InputError", str(first["msg"]), "body", SEND_JSON)
    field = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    return error_response(422, "InputError", message, field, "see /docs for the fields")


SEND_JSON = "send JSON in UTF-8, with Content-Type: application/json; see /docs for the fields"
OF_STATUS = {
    400: ("body", SEND_JSON),
    404: ("path", "see /docs for the paths"),
    408: ("body", "send it without a break, in smaller parts if need be"),
    405: ("method", "see /docs for the methods of this path"),
    413: ("body", "send less at once"),
    503: (None, "try again"),
}
"""Field and remedy of errors that the framework raises."""


async def _answer_http(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    field, remedy = OF_STATUS.get(exc.status_code, (None, None))
    response = error_response(exc.status_code, "HTTPError", str(exc.detail), field, remedy)
    response.headers.update(exc.headers or {})
    return response


class BearerToken:
    """ASGI middleware: paths under ``/v1`` need ``Authorization: Bearer <token>`` (compared in constant time)."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._allows(scope):
            refusal = error_response(
                401, "Unauthorized", "bearer token missing or wrong", "Authorization", "set the token"
            )
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class _HeadAnswered(Exception):  # noqa: N818 - no error
    """Everything that a HEAD request is told has been told."""


def _has_route(scope: Scope) -> bool:
    """Whether the application answers this method by itself, as the synchronizer does to those who wait."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


class HeadAsGet:
    """ASGI middleware: HEAD is answered as GET is, without the body, and ends where that would begin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or _has_route(scope):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise _HeadAnswered

        with contextlib.suppress(_HeadAnswered):
            await self._app({**scope, "method": "GET"}, receive, send_head)


class BodyUntilExit:
    """ASGI middleware: who is still sending a body when the process ends gets 503, who goes away before that nothing,
    and who stops sending in the middle, or takes for ever, 408.

    Without it a stop waits for bodies that may never come, and each of them ends in a traceback.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: Background | None = scope["app"].state.tasks
        if scope["type"] != "http" or tasks is None:
            await self._app(scope, receive, send)
            return
        complete = False
        due_s = time.monotonic() + BODY_DEADLINE_S
        exit_wait: asyncio.Task[bool] | None = None

        async def receive_until_exit() -> Message:
            nonlocal complete, exit_wait
            if complete:
                return await receive()
            wait_s = min(BODY_IDLE_S, due_s - time.monotonic())
            # One for all messages: there are hundreds in a large body.
            exit_wait = exit_wait or asyncio.create_task(tasks.exit.wait())
            message = await _unless_done(exit_wait, receive(), wait_s=max(0.0, wait_s))
            if message is None and tasks.exit.is_set():
                raise HTTPException(503, "the process ends, and the body has not arrived")
            if message is None:
                raise HTTPException(408, "the body has not arrived")
            complete = not message.get("more_body", False)
            return message

        try:
            with contextlib.suppress(ClientDisconnect):
                await self._app(scope, receive_until_exit, send)
        finally:
            if exit_wait is not None:
                exit_wait.cancel()


async def _unless_done(end: asyncio.Task[bool], message: Awaitable[Message], *, wait_s: float) -> Message | None:
    """The message, or None when the task ends, or the time is over, before it comes."""
    bound = asyncio.timeout(wait_s)

    is_waiting = True

    def give_up(_: asyncio.Task[bool]) -> None:
        if is_waiting:
            bound.reschedule(0.0)

    try:
        async with bound:
            end.add_done_callback(give_up)
            try:
                return await message
            finally:
                end.remove_done_callback(give_up)
                is_waiting = False  # it may have been called already, for the next turn of the loop
    except TimeoutError:
        return None


class BodyLimit:
    """ASGI middleware: a request body over ``max_bytes`` ends with 413, whether or not it announced its length.

    ``larger`` has the paths that take more.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, larger: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._larger.get(scope["path"], self._max_bytes)
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > max_bytes:
            await self._refuse(scope, receive, send, max_bytes)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise HTTPException(413, f"body is over {max_bytes} bytes")
            return message

        await self._app(scope, limited_receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        message = f"body is over {max_bytes} bytes"
        await error_response(413, "InputError", message, "body", "send smaller batches")(scope, receive, send)
