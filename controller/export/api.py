"""``GET /v1/export/{table}.{format}``: read in a thread and streamed page by page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Annotated, ClassVar, Protocol

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from controller.export.columns import Table
from controller.export.stream import DEFAULT_ROWS, MAX_ROWS, MEDIA_TYPES, Export, Format, Request, open_export
from controller.metrics import Metrics
from controller.state import FleetState
from service.errors import OverloadedError, UnavailableError, WadilocoError
from service.extras import require_extra

logger = logging.getLogger(__name__)

NEXT_SINCE_HEADER = "X-Next-Since"
MAX_NUMBER = 2**63 - 1
MAX_EXPORTS = 4
"""At once: each holds a page in memory, and reads the disk that the journal writes to."""


class Source(Protocol):
    """Whose journal is exported (the controller)."""

    metrics: Metrics

    @property
    def state(self) -> FleetState: ...


class NotInstalledError(UnavailableError):
    """This controller lacks the optional package that the format needs; trying again does not help."""

    http_status: ClassVar[int] = 501


class Exporter:
    """Runs a few exports at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._num_running = 0

    async def open(self, request: Request) -> Export:
        if request.format is Format.PARQUET:
            try:
                require_extra("export")
            except UnavailableError as exc:
                raise NotInstalledError(exc.message, field="format", remedy=f"{exc.remedy}, or take csv") from exc
        if self._num_running >= MAX_EXPORTS:
            raise OverloadedError(f"{MAX_EXPORTS} exports run already", remedy="try again when one has ended")
        on_rows = self._source.metrics.export_rows.labels(request.table, request.format).inc
        self._num_running += 1  # before anything is waited for: who asks meanwhile counts too
        try:
            return await asyncio.to_thread(partial(open_export, self._source.state.reader, request, on_rows=on_rows))
        finally:
            self._num_running -= 1

    async def stream(self, export: Export) -> AsyncIterator[bytes]:
        """The file in pieces. A journal that fails now cuts the answer short, which no reader takes for its end."""
        self._num_running += 1
        pieces = export.pieces()
        try:
            while (piece := await asyncio.to_thread(_next, pieces)) is not None:
                yield piece
        except WadilocoError as exc:
            logger.warning("export cut short table=%s error=%s", export.request.table, exc)
            raise
        finally:
            self._num_running -= 1


def _next(pieces: Iterator[bytes]) -> bytes | None:
    with contextlib.suppress(StopIteration):
        return next(pieces)
    return None


def build_export_router(source: Source) -> APIRouter:
    router = APIRouter(prefix="/export", tags=["exports"])
    exporter = Exporter(source)

    @router.get(
        "/{table}.{format}",
        summary="A table as a file, for BI tools",
        response_class=StreamingResponse,
        responses={
            200: {
                "description": "Rows in the order of `id`. The header `X-Next-Since` has the highest id.",
                "content": {media_type: {} for media_type in MEDIA_TYPES.values()},
            },
            501: {"description": "The package for Parquet is not installed here."},
        },
    )
    async def get_export(
        table: Table,
        format: Format,  # noqa: A002
        since: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Only rows with a higher id.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = DEFAULT_ROWS,
    ) -> StreamingResponse:
        export = await exporter.open(Request(table=table, format=format, since=since, limit=limit))
        headers = {
            NEXT_SINCE_HEADER: str(export.next_since),
            "Content-Disposition": f'attachment; filename="{export.request.file_name}"',
        }
        return StreamingResponse(exporter.stream(export), media_type=MEDIA_TYPES[format], headers=headers)

    return router
