"""Captures, edited pages, and a real HTTP server on loopback that serves them.

The server stands in for a vLLM that restarts, hangs, refuses or answers garbage at a chosen moment.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from fastapi import FastAPI

from sidecar.source.parse import PageParser
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome, ScrapeResult

CAPTURES = Path(__file__).parents[1] / "data" / "vllm-metrics"
TEXT = "text/plain; version=1.0.0; charset=utf-8"
DEADLINE_S = 15.0


def capture(name: str) -> str:
    return (CAPTURES / f"vllm-0.32.0-{name}.txt").read_text()


def edited(page: str, values: dict[str, float]) -> str:
    """``page`` with the value of every series of these names replaced."""
    for name, value in values.items():
        page, count = re.subn(rf"^({re.escape(name)}(?:\{{.*\}})?) \S+$", rf"\g<1> {value}", page, flags=re.MULTILINE)
        assert count, f"the page has no series {name}"
    return page


def without(page: str, name: str) -> str:
    """``page`` without the samples whose name begins with ``name``."""
    kept = [line for line in page.splitlines(keepends=True) if not line.startswith(name)]
    assert len(kept) < len(page.splitlines()), f"the page has no series {name}"
    return "".join(kept)


def parse(page: str, *, t_s: float = 1000.0, prefix: str = "vllm:", content_type: str = TEXT) -> EngineSnapshot:
    snapshot = PageParser(prefix).parse(page, content_type=content_type, t_s=t_s, monotonic_s=t_s)
    assert snapshot is not None
    return snapshot


def good(snapshot: EngineSnapshot) -> ScrapeResult:
    return ScrapeResult(
        outcome=ScrapeOutcome.OK,
        t_s=snapshot.t_s,
        monotonic_s=snapshot.monotonic_s,
        duration_s=0.01,
        snapshot=snapshot,
    )


def bad(outcome: ScrapeOutcome, *, t_s: float) -> ScrapeResult:
    return ScrapeResult(outcome=outcome, t_s=t_s, monotonic_s=t_s, duration_s=0.01)


class Upstream:
    """What the stand-in server answers; change the attributes while it runs."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.status = 200
        self.content_type = TEXT
        self.num_requests = 0
        self.headers: dict[str, str] = {}
        self.hang = threading.Event()
        """Set: requests are accepted and never answered, until `released`."""
        self.released = threading.Event()
        self.delay_s = 0.0
        """Before each answer."""
        self.health_status = 404
        self.cut = False
        """Announce the whole page and close after half of it."""
        self.url = ""


@contextmanager
def serving(upstream: Upstream, *, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve ``upstream`` on loopback; the port refuses connections afterwards."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            upstream.num_requests += 1
            upstream.headers = dict(self.headers.items())
            if upstream.hang.is_set():
                upstream.released.wait(DEADLINE_S)
                self.close_connection = True
                return
            time.sleep(upstream.delay_s)
            body = upstream.page.encode()
            statuses = {"/metrics": upstream.status, "/health": upstream.health_status}
            self.send_response(statuses.get(self.path, 404))
            self.send_header("Content-Type", upstream.content_type)
            self.send_header("Content-Length", str(len(body)))
            # A kept connection would outlive the server that is being "killed".
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if upstream.cut else body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    upstream.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        upstream.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for ``condition``; fails after `DEADLINE_S`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The application with its background tasks, and a client of it."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client,
    ):
        yield client
