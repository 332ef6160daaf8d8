"""The store over which the ranks of this agent's island meet: here, so that a dead controller costs no step.

On loopback alone, under a password of this process, whatever address and certificates the agent shows to others: its
ranks get both through the pipe. It is a task of the agent's event loop, and needs no more than that: ranks ask a dozen
times when they meet, and then no more.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr

from service.app import BearerToken, answer_error
from service.errors import WadilocoError
from service.server import bind
from service.store_api import SharedStore, build_store_router

LOOPBACK = "127.0.0.1"
CLOSE_S = 1


class RankStore:
    """One store for all workers that this agent starts."""

    def __init__(self) -> None:
        self.token = SecretStr(secrets.token_hex(16))
        self._listener = bind(LOOPBACK, 0)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"

    async def run(self, exit_event: asyncio.Event) -> None:
        """Answer until ``exit_event``."""
        store = SharedStore()
        app = FastAPI(openapi_url=None)
        app.add_middleware(BearerToken, token=self.token.get_secret_value())
        app.add_exception_handler(WadilocoError, answer_error)
        app.include_router(build_store_router(store))
        config = uvicorn.Config(
            app,
            http="h11",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        server = _Guest(config)
        with self._listener:
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            await exit_event.wait()
            store.close()
            server.should_exit = True
            await serving


class _Guest(uvicorn.Server):
    """A server in the event loop of another: signals are the host's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
