"""The agent's endpoints for replicas: what others send it to keep, and fetch; see `diloco.agent.replica_wire`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import xxhash
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from diloco.agent.replica_store import Place, ReplicaStore
from diloco.agent.replica_wire import CHUNK_DIGEST_HEADER, MAX_CHUNK_BYTES, ReplicaOffer, ReplicaReply
from diloco.digest import ByteRange, format_content_range, parse_content_range, parse_range
from diloco.recovery_schema import MAX_RANKS, ReplicaList
from diloco.schema import MAX_SLOTS
from service.errors import InputError

PIECE_BYTES = 1 << 18

SlotPath = Annotated[int, Path(ge=0, lt=MAX_SLOTS)]
RankPath = Annotated[int, Path(ge=0, lt=MAX_RANKS)]
NumberPath = Annotated[int, Path(ge=0, lt=1 << 62)]
PartPath = Annotated[int, Path(ge=0)]
Epoch = Annotated[int, Query(ge=0, lt=1 << 62, description="Of the sender's lease.")]


def build_replica_router(store: ReplicaStore, told: Callable[[], ReplicaList]) -> APIRouter:
    """``told`` makes the answer to the list."""
    router = APIRouter(prefix="/v1/replicas", tags=["replicas"])
    locks: dict[Place, asyncio.Lock] = {}

    @router.get("", summary="What is kept here of other slots, and how far the own slot's buddies are")
    async def list_replicas() -> ReplicaList:
        return told()

    @router.put("/{slot}/{rank}/{generation}", summary="Announce a generation")
    async def put_offer(
        slot: SlotPath, rank: RankPath, generation: NumberPath, epoch: Epoch, offer: ReplicaOffer
    ) -> ReplicaReply:
        if offer.generation.number != generation:
            raise InputError(f"is {offer.generation.number}, the path says {generation}", field="generation")
        async with locks.setdefault((slot, rank), asyncio.Lock()):
            return store.offer(slot, rank, offer, epoch=epoch)

    @router.put("/{slot}/{rank}/{generation}/{part}", summary="One chunk of a part")
    async def put_chunk(
        request: Request,
        slot: SlotPath,
        rank: RankPath,
        generation: NumberPath,
        part: PartPath,
        epoch: Epoch,
        content_range: Annotated[str, Header(max_length=100)],
        digest: Annotated[str, Header(alias=CHUNK_DIGEST_HEADER, max_length=32)],
    ) -> ReplicaReply:
        length = _announced_length(request)
        at = parse_content_range(content_range, length=length)
        async with locks.setdefault((slot, rank), asyncio.Lock()):
            sink = store.receiving(slot, rank, generation, part, epoch=epoch)
            if at.total != sink.part_bytes:
                raise InputError(f"says {at.total} bytes, offered were {sink.part_bytes}", field="Content-Range")
            if at.start == sink.expected_start:
                async for piece in request.stream():
                    sink.write(piece)
                sink.finish(digest)
            return store.progress(slot, rank, epoch=epoch)

    @router.get("/{slot}/{rank}/{generation}", summary="What a complete generation is made of")
    async def get_offer(slot: SlotPath, rank: RankPath, generation: NumberPath) -> ReplicaOffer:
        return store.offer_of(slot, rank, generation)

    @router.get("/{slot}/{rank}/{generation}/{part}", summary="Bytes of a part")
    async def get_chunk(
        slot: SlotPath,
        rank: RankPath,
        generation: NumberPath,
        part: PartPath,
        range_: Annotated[str, Header(alias="Range", max_length=100)],
    ) -> Response:
        vault, whole = store.whole(slot, rank, generation)
        if part >= len(whole.parts):
            raise InputError(f"there are {len(whole.parts)} parts", field="part")
        found = whole.parts[part]
        at = parse_range(range_, total=found.length, max_bytes=MAX_CHUNK_BYTES)
        data = b"".join(store.chunks(vault, found, at.start, at.stop, piece=PIECE_BYTES))
        if not vault.holds(whole):  # given up while it was copied
            raise InputError(f"{generation} is not here any more", field="generation")
        headers = {
            "Content-Range": format_content_range(ByteRange(at.start, at.stop, found.length)),
            CHUNK_DIGEST_HEADER: xxhash.xxh3_128_hexdigest(data),
            "Content-Length": str(len(data)),
        }
        return StreamingResponse(_pieces(data), status_code=206, headers=headers, media_type="application/octet-stream")

    return router


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """The event loop's other tasks have their turn between two."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
        await asyncio.sleep(0)


def _announced_length(request: Request) -> int:
    """Raises `InputError`: the request does not say how long it is, or is too long."""
    text = request.headers.get("content-length", "")
    if not text.isdigit() or not 0 < int(text) <= MAX_CHUNK_BYTES:
        raise InputError(
            f"must be from 1 to {MAX_CHUNK_BYTES}",
            field="Content-Length",
            remedy="send smaller chunks",
        )
    return int(text)
