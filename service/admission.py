"""How many connections one process has open at a time, and what becomes of those beyond.

    up to `Admission.limit`    served
    `RESERVE` more             health and metrics are answered; anything else gets 503 with ``Retry-After``, and the
                               connection ends, unless there is room by then
    beyond                     closed as soon as they are there

uvicorn's own ``limit_concurrency`` is of no use here: with so many connections open it refuses every request, also
those of clients that have long been served, and the health checks.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from service.answers import error_response

logger = logging.getLogger(__name__)

RESERVE = 64
"""Connections for health checks, and to tell the others that there is no room."""
RESERVED_HEAD_S = 3.0
"""For the request of one of them: who says nothing must not keep health checks out."""
RETRY_AFTER_S = 5
OPEN_FILES_BESIDE = 128
"""Files, peers and pipes of the process besides the connections that it serves."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


class Admission:
    """The connections of one process; its event loop alone touches it."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
        self.num_served = 0
        self.num_reserved = 0
        self.num_refused = 0
        """Connections that were closed, and requests that were told that there is no room."""

    def enter(self) -> bool | None:
        """Count a new connection: whether it is served; None when it must go at once, and is not counted."""
        if self.num_served < self.limit:
            self.num_served += 1
            return True
        if self.num_reserved < RESERVE:
            self.num_reserved += 1
            return False
        self.num_refused += 1
        return None

    def promote(self) -> bool:
        """Serve a reserved connection from now on, if there is room."""
        if self.num_served >= self.limit:
            return False
        self.num_reserved -= 1
        self.num_served += 1
        return True

    def leave(self, *, served: bool) -> None:
        if served:
            self.num_served -= 1
        else:
            self.num_reserved -= 1


class Doorkeeper:
    """ASGI application of one reserved connection: health, or a refusal, as long as there is no room."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission
        self.served = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.served = self.served or self._admission.promote()
        if self.served or scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        self._admission.num_refused += 1
        limit = self._admission.limit
        response = error_response(
            503,
            "BusyError",
            f"{limit} connections are open, and no more are served",
            None,
            "come back later, or raise max_connections",
        )
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


class AdmissionCollector(Collector):
    """The metrics of one process's connections."""

    def __init__(self, admission: Admission, service: str) -> None:
        self._admission = admission
        self._service = service

    def collect(self) -> Iterator[Metric]:
        told, prefix = self._admission, f"wadiloco_{self._service}_connections"
        served = told.num_served + told.num_reserved
        yield GaugeMetricFamily(prefix, "Connections that are open.", value=served)
        yield GaugeMetricFamily(f"{prefix}_limit", "Connections that are served at most.", value=told.limit)
        yield CounterMetricFamily(f"{prefix}_refused", "Connections over the limit.", value=told.num_refused)


def fit_open_files(limit: int) -> int:
    """Let the process open as many files as so many connections need; returns how many of them it may have."""
    beside = RESERVE + OPEN_FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = limit + beside if hard == resource.RLIM_INFINITY else min(limit + beside, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < limit + beside:
        logger.warning(
            "fewer connections than max_connections: the system allows too few open files connections=%d wanted=%d",
            max(1, allowed - beside),
            limit,
        )
    return max(1, min(limit, allowed - beside))
