"""Requests of one agent to another's replicas. Errors are those of the other side, or that it cannot be reached."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

import httpx
import xxhash
from pydantic import BaseModel, ValidationError

from diloco.agent.replica_wire import CHUNK_BYTES, CHUNK_DIGEST_HEADER, ReplicaOffer, ReplicaReply
from diloco.digest import ByteRange, format_content_range
from diloco.vault.layout import Generation, Layout
from service.client import refusal
from service.deadline import deadline
from service.errors import UnavailableError

M = TypeVar("M", bound=BaseModel)


def make_offer(layout: Layout, generation: Generation) -> ReplicaOffer:
    return ReplicaOffer(layout=base64.b64encode(layout.encode()).decode(), generation=generation)


class ReplicaClient:
    """One other agent. Each request ends within ``timeout_s``."""

    def __init__(self, http: httpx.AsyncClient, url: str, *, timeout_s: float) -> None:
        self._http = http
        self._url = f"{url.rstrip('/')}/v1/replicas"
        self._timeout_s = timeout_s

    async def offer(self, offer: ReplicaOffer, *, epoch: int) -> ReplicaReply:
        """Raises `ConflictError` (the slot is lost), `OverloadedError` (no memory), `UnavailableError`."""
        response = await self._ask("PUT", _path(offer.generation), params={"epoch": epoch}, json=_plain(offer))
        return _read(ReplicaReply, response)

    async def send(self, generation: Generation, part: int, at: ByteRange, data: bytes, *, epoch: int) -> ReplicaReply:
        """One chunk."""
        response = await self._ask(
            "PUT",
            f"{_path(generation)}/{part}",
            params={"epoch": epoch},
            content=data,
            headers={
                "Content-Range": format_content_range(at),
                CHUNK_DIGEST_HEADER: xxhash.xxh3_128_hexdigest(data),
                "Content-Type": "application/octet-stream",
            },
        )
        return _read(ReplicaReply, response)

    async def describe(self, slot: int, rank: int, number: int) -> ReplicaOffer:
        """What a generation there is made of."""
        return _read(ReplicaOffer, await self._ask("GET", f"/{slot}/{rank}/{number}"))

    async def fetch(self, generation: Generation, part: int, start: int) -> tuple[bytes, str]:
        """The next chunk of a part, and its digest.

        Raises:
            UnavailableError: it is not there any more, or not as its digest says.
        """
        stop = min(start + CHUNK_BYTES, generation.parts[part].length)
        response = await self._ask("GET", f"{_path(generation)}/{part}", headers={"Range": f"bytes={start}-{stop - 1}"})
        data, digest = response.content, response.headers.get(CHUNK_DIGEST_HEADER, "")
        if len(data) != stop - start or xxhash.xxh3_128_hexdigest(data) != digest:
            raise UnavailableError("a chunk is not as its digest says", field="replica")
        return data, digest

    async def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            with deadline(self._timeout_s):
                response = await self._http.request(method, f"{self._url}{path}", timeout=self._timeout_s, **arguments)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
            raise UnavailableError(f"{type(exc).__name__}: {exc}", field="buddy") from exc
        if response.is_error:
            raise refusal(response, field="buddy")
        return response


def _path(generation: Generation) -> str:
    return f"/{generation.slot}/{generation.rank}/{generation.number}"


def _plain(model: BaseModel) -> Any:
    return model.model_dump(mode="json")


def _read(model: type[M], response: httpx.Response) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as exc:
        raise UnavailableError(f"the answer is no {model.__name__}", field="buddy") from exc
