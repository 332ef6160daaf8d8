"""The dashboard of one controller: its tick, its endpoints, its pages."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response

from controller.core import Controller
from controller.dashboard.feed import Feed
from controller.dashboard.metrics import EventMetrics
from controller.dashboard.pages import build_pages
from controller.dashboard.picture import find_rows, read_history, take_picture
from controller.dashboard.schema import FoundRows, ServerHistory
from controller.dashboard.stream import EventStream
from service.errors import OverloadedError
from service.repeats import Repeats
from service.tasks import Background, every

logger = logging.getLogger(__name__)

EVENTS_PERIOD_S = 1.0
MAX_CLIENTS = 64
"""Each gets a tick a second: with 200 servers and 100 islands that all change, some 120 kB."""
STREAM_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events `snapshot` and `tick`, each a `Frame`", "content": {"text/event-stream": {}}}
}


class Dashboard:
    """Looks at the controller once a second and tells all clients what has changed."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._metrics = EventMetrics(controller.metrics.registry)
        self._repeats = Repeats(logger)
        self.feed = Feed()
        self.router = APIRouter()
        self.router.include_router(build_pages())
        self._add_routes()

    def start(self, tasks: Background) -> None:
        async def publish() -> None:
            try:
                await every(EVENTS_PERIOD_S, tasks.exit, self.tick)
            finally:
                self.feed.close()

        tasks.start("events", publish)

    async def tick(self) -> None:
        """One tick, while there is a state; a failure is counted and the next one tries again."""
        if not self._controller.has_state:
            return
        try:
            self._controller.recent.history.keep_only(self._controller.state.samples.server_ids)
            if self.feed.num_clients:
                self.feed.publish(take_picture(self._controller))
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self._metrics.failures.inc()
            self._repeats.error("picture failed", exc)

    def _open_stream(self, last_event_id: str | None) -> EventStream:
        if self.feed.num_clients >= MAX_CLIENTS:
            self._metrics.refused.inc()
            raise OverloadedError(
                f"{MAX_CLIENTS} clients follow the events already",
                field="/v1/events",
                remedy="close other dashboards, or ask GET /v1/fleet",
            )
        if not self.feed.num_clients:
            # Nobody looked meanwhile: the picture is as old as its last reader.
            self.feed.publish(take_picture(self._controller))
        return EventStream(self.feed, self._metrics, last_event_id=last_event_id)

    def _add_routes(self) -> None:
        router = APIRouter(prefix="/v1", tags=["dashboard"])

        @router.get(
            "/events",
            summary="Live events (SSE): a snapshot, then what changes, once a second",
            response_model=None,
            responses=STREAM_ANSWER,
        )
        async def get_events(
            last_event_id: Annotated[
                str | None, Header(max_length=64, description="Go on after this event, if it is still kept.")
            ] = None,
        ) -> Response:
            return self._open_stream(last_event_id)

        @router.get("/history", summary="The last ten minutes of one server, and its forecast")
        async def get_history(
            server_id: Annotated[str, Query(min_length=1, max_length=128)],
        ) -> ServerHistory:
            return read_history(self._controller, server_id)

        @router.get("/fleet/rows", summary="Servers and islands by a part of their name")
        async def get_rows(
            contains: Annotated[str, Query(max_length=128)] = "",
            limit: Annotated[int, Query(ge=1, le=500)] = 200,
        ) -> FoundRows:
            return find_rows(self._controller, contains, limit=limit)

        self.router.include_router(router)
