"""The HTTP interface of the synchronizer; see `diloco.schema` for the contract."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from diloco.codec import codec_named
from diloco.digest import (
    NOT_WANTED,
    WANT_CONTENT_DIGEST,
    ByteRange,
    format_content_range,
    format_digest,
    parse_content_range,
    parse_digest,
    parse_range,
    require_digest,
    sha256,
)
from diloco.errors import VersionError, VersionGoneError
from diloco.schema import (
    CHUNK_BYTES,
    MAX_FRAGMENTS,
    MAX_SLOTS,
    VERSION_HEADER,
    ChunkReply,
    Count,
    InitReply,
    OuterState,
    Slot,
)
from diloco.stages import STAGES, Stage
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.download import Download, Opened, download
from diloco.synchronizer.metrics import Direction, Metrics, Verdict
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.run import Run
from diloco.synchronizer.upload import Chunk
from service.app import build_app
from service.routes import counting_route
from service.tasks import Background

MAX_WAIT_S = 60.0
MAX_TOKENS = 10**12
"""Of one contribution: no island trains on more between two outer steps."""
MAX_EPOCH = 1 << 62
MAX_CLOSES_IN_S = 86_400.0
MAX_CODEC_NAME = 32
MAX_RUN = 64

Fragment = Annotated[int, Path(ge=0, lt=MAX_FRAGMENTS)]
Digest = Annotated[str | None, Header()]


def create_app(settings: SynchronizerSettings) -> FastAPI:
    """The application; it goes on from ``settings.directory``, which the caller owns (`storage.owned`)."""
    metrics = Metrics()
    run = Run(settings, metrics)
    run.load()

    @asynccontextmanager
    async def lifespan(_: FastAPI, tasks: Background) -> AsyncIterator[None]:
        tasks.start("close_rounds", lambda: run.close_rounds(tasks.exit))
        tasks.start("announce_exit", lambda: run.announce_exit(tasks.exit))
        yield

    app = build_app(
        settings,
        lifespan=lifespan,
        registry=metrics.registry,
        readiness=lambda: run.problem,
        description="Global parameters and outer optimizer of a DiLoCo run.",
    )
    app.add_exception_handler(VersionError, _answer_version)
    _add_offers(app, run)
    _add_contributions(app, run, metrics)
    _add_downloads(app, run, metrics)
    return app


def _add_offers(app: FastAPI, run: Run) -> None:
    @app.put("/v1/fragments/0", tags=["run"], summary="Offer initial parameters of all fragments, chunk by chunk")
    async def offer(
        request: Request,
        response: Response,
        content_range: Digest = None,
        content_digest: Digest = None,
        repr_digest: Digest = None,
    ) -> InitReply:
        chunk = await asyncio.to_thread(_chunk, await request.body(), content_range, content_digest, repr_digest)
        response.headers[WANT_CONTENT_DIGEST] = NOT_WANTED
        return await run.offer(chunk)


def _add_contributions(app: FastAPI, run: Run, metrics: Metrics) -> None:
    router = APIRouter(route_class=counting_route(metrics.contributions.labels(Verdict.INVALID)))

    @router.put(
        "/v1/rounds/{round}/fragments/{fragment}/contributions/{slot}",
        tags=["run"],
        summary="Contribute to a round, chunk by chunk",
    )
    async def contribute(
        round: Count,  # noqa: A002  (the name in the path)
        fragment: Fragment,
        slot: Slot,
        epoch: Annotated[int, Query(ge=0, lt=MAX_EPOCH)],
        tokens: Annotated[int, Query(ge=1, le=MAX_TOKENS)],
        request: Request,
        response: Response,
        codec: Annotated[str, Query(max_length=MAX_CODEC_NAME, description="How the bytes are encoded.")] = "fp32",
        quorum: Annotated[int | None, Query(ge=1, le=MAX_SLOTS)] = None,
        expected: Annotated[int | None, Query(ge=1, le=MAX_SLOTS)] = None,
        closes_in_s: Annotated[float | None, Query(ge=0, le=MAX_CLOSES_IN_S)] = None,
        run_id: Annotated[
            str | None, Query(alias="run", max_length=MAX_RUN, description="Which run it is for.")
        ] = None,
        content_range: Digest = None,
        content_digest: Digest = None,
        repr_digest: Digest = None,
    ) -> ChunkReply:
        claim = Claim(
            round=round,
            slot=slot,
            epoch=epoch,
            tokens=tokens,
            codec=codec_named(codec).name,
            run=run_id or None,
            quorum=quorum,
            expected=expected,
            closes_in_s=closes_in_s,
        )
        chunk = await asyncio.to_thread(_chunk, await request.body(), content_range, content_digest, repr_digest)
        response.headers[WANT_CONTENT_DIGEST] = NOT_WANTED
        return await run.fragment(fragment).contribute(claim, chunk)

    app.include_router(router)


def _add_downloads(app: FastAPI, run: Run, metrics: Metrics) -> None:
    @app.head("/v1/fragments/{fragment}", tags=["run"], summary="Wait for a version newer than after_version")
    async def wait(
        fragment: Fragment,
        after_version: Annotated[int, Query(ge=-1)] = -1,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> Response:
        tasks: Background = app.state.tasks
        published = run.fragment(fragment).published
        generation = await published.wait_newer(after_version, wait_s=wait_s, exit_event=tasks.exit)
        if generation is None:
            return Response(status_code=204)
        return Response(headers=Download(generation=generation).headers | {"Content-Length": str(generation.num_bytes)})

    @app.get("/v1/fragments/{fragment}", tags=["run"], summary="Bytes of the global parameters")
    async def pull(
        fragment: Fragment,
        version: Annotated[int | None, Query(ge=0)] = None,
        base_version: Annotated[int | None, Query(ge=0, description="The version that the island has.")] = None,
        slot: Annotated[Slot | None, Query(description="Whose last contribution to tell of.")] = None,
        range: Annotated[str | None, Header()] = None,  # noqa: A002  (the name of the field)
        want_content_digest: Annotated[str | None, Header()] = None,
    ) -> Response:
        whole = download(run.fragment(fragment).published, version, base_version, slot=slot)
        if range is None:
            headers = whole.headers | {"Content-Length": str(whole.num_bytes)}
            file = await asyncio.to_thread(_open, whole)
            return StreamingResponse(_stream(file, whole, metrics), headers=headers)
        part = parse_range(range, total=whole.num_bytes, max_bytes=CHUNK_BYTES)
        # The whole of a chain of deltas has no digest.
        is_wanted = want_content_digest != NOT_WANTED or bool(whole.chain)
        data, digest = await asyncio.to_thread(_read, whole, part, is_hashed=is_wanted)
        metrics.bytes.labels(Direction.OUT).inc(len(data))
        headers = whole.headers | {"Content-Range": format_content_range(part)}
        if digest is not None:
            headers["Content-Digest"] = format_digest(digest)
        return Response(data, status_code=206, headers=headers)

    @app.get("/v1/state", tags=["run"], summary="Version, manifest and open round")
    async def state(
        slot: Annotated[
            Slot | None, Query(description="Who asks; with a round, who comes to contribute to it.")
        ] = None,
        round: Annotated[Count | None, Query()] = None,  # noqa: A002  (the name in the path)
        fragment: Annotated[int, Query(ge=0, lt=MAX_FRAGMENTS)] = 0,
    ) -> OuterState:
        if slot is not None and round is not None:
            run.note_arrival(slot, round, fragment=fragment)
        return run.state(slot=slot)


def _chunk(data: bytes, content_range: str | None, content_digest: str | None, repr_digest: str | None) -> Chunk:
    """A chunk whose own digest is right, or that may go without one: all but the first, which costs nothing more."""
    part = parse_content_range(content_range, length=len(data))
    digest = parse_digest(repr_digest, field="Repr-Digest")
    hashed = None
    if part.start == 0 or content_digest is not None:
        with STAGES.of(Stage.DIGEST):
            hashed = hashlib.sha256(data)
            require_digest(hashed.digest(), content_digest)
    return Chunk(start=part.start, total=part.total, digest=digest, data=data, hashed=hashed)


def _read(whole: Download, part: ByteRange, *, is_hashed: bool) -> tuple[bytes, bytes | None]:
    try:
        with STAGES.of(Stage.READ):
            data = whole.read(part.start, part.stop)
    except FileNotFoundError as exc:
        raise _gone(whole) from exc
    if not is_hashed:
        return data, None
    with STAGES.of(Stage.DIGEST):
        return data, sha256(data)


def _open(whole: Download) -> Opened:
    """What is downloaded, kept open for as long as somebody reads it: newer versions may take it away meanwhile."""
    try:
        return whole.open()
    except FileNotFoundError as exc:
        raise _gone(whole) from exc


def _gone(whole: Download) -> VersionGoneError:
    version = whole.generation.version
    return VersionGoneError(f"version {version} is not kept any more", version=version + 1, field="version")


async def _stream(file: Opened, whole: Download, metrics: Metrics) -> AsyncIterator[bytes]:
    with file:
        for start in range(0, whole.num_bytes, CHUNK_BYTES):
            data = await asyncio.to_thread(file.read, min(CHUNK_BYTES, whole.num_bytes - start))
            metrics.bytes.labels(Direction.OUT).inc(len(data))
            yield data


async def _answer_version(_: Request, exc: Exception) -> Response:
    """As other errors, with the current version in a field that needs no parsing."""
    assert isinstance(exc, VersionError)
    body = {"error": type(exc).__name__, "message": exc.message, "field": exc.field, "remedy": exc.remedy}
    return JSONResponse(body, status_code=exc.http_status, headers={VERSION_HEADER: str(exc.version)})
