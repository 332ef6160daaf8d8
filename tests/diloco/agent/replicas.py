"""Vaults as a worker would write them, and agents that keep replicas, over HTTP in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from diloco.agent.replica_api import build_replica_router
from diloco.agent.replica_store import ReplicaStore
from diloco.recovery_schema import Peer, ReplicaList
from diloco.vault.file import VaultFile, copy_into
from diloco.vault.layout import Generation, Part, RegionNeed
from service.app import answer_error
from service.errors import WadilocoError

HOT_BYTES = 5 << 20
BASE_BYTES = 1 << 20
NEEDS = (RegionNeed(HOT_BYTES + 4096, 2), RegionNeed(BASE_BYTES, 3))
RECORD_BYTES = 8000
RUN = "run-1"


class WorkerVault:
    """The vault of one rank."""

    def __init__(self, path: Path, *, slot: int = 1, rank: int = 0, num_ranks: int = 1, seed: int = 0) -> None:
        self.vault = VaultFile.create(path, NEEDS, record_bytes=RECORD_BYTES)
        self.place = {"slot": slot, "rank": rank, "num_ranks": num_ranks}
        self._random = random.Random(seed + rank)
        self._base: Part | None = None

    @property
    def path(self) -> Path:
        return self.vault.path

    def commit(self, number: int, *, new_base: bool = False, **fields: Any) -> Generation:
        """The next generation: other weights, and other global parameters where that is said."""
        self.vault.begin(keep=self.vault.newest_number() or None)
        base = None if new_base else self._base
        data = {"hot": self._random.randbytes(HOT_BYTES + 8 * (number % 5))}
        if base is None:
            data["global/0"] = self._random.randbytes(BASE_BYTES)
        regions = self.vault.reserve([len(each) for each in data.values()], kept=[] if base is None else [base])
        parts = [] if base is None else [base]
        for (name, each), region in zip(data.items(), regions, strict=True):
            made = copy_into(self.vault.region(region), [each])
            parts.append(made.model_copy(update={"name": name, "region": region}))
        told = {"run_id": RUN, "instance": "a", "epoch": 3, "step": 10 * number, "tokens": number, "model": "m"}
        generation = Generation.model_validate(
            {"number": number, "parts": tuple(parts), "state": {"n": number}, **self.place, **told, **fields}
        )
        self.vault.commit(generation)
        self._base = generation.part("global/0")
        return generation


def contents(vault: VaultFile, generation: Generation) -> dict[str, bytes]:
    return {part.name: bytes(vault.view(part)) for part in generation.parts}


class Keeper:
    """An agent that keeps replicas."""

    def __init__(self, directory: Path, name: str, *, limit_bytes: int = 1 << 30) -> None:
        self.peer = Peer(agent_id=name, url=f"http://{name}", node=f"on-{name}")
        self.store = ReplicaStore(directory, owner=name, limit_bytes=limit_bytes)
        self.store.run_id = RUN
        self.app = FastAPI()
        self.app.add_exception_handler(WadilocoError, answer_error)
        self.app.include_router(build_replica_router(self.store, self._told))
        self.chunks: list[str] = []
        """Paths of the chunks that came."""
        self.fail_after: int | None = None
        """Chunks until it answers nothing but 503."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.app.middleware("http")(self._count)

    async def _count(self, request: Request, call_next: Any) -> Response:
        if self.fail_after is not None and len(self.chunks) >= self.fail_after:
            return Response(status_code=503)
        if request.url.path.count("/") == 6:
            self.chunks.append(request.url.path)
            await self.may_answer.wait()
        response: Response = await call_next(request)
        return response

    def _told(self) -> ReplicaList:
        store = self.store
        return ReplicaList(
            replicas=store.notices(), allocated_bytes=store.allocated_bytes, limit_bytes=store.limit_bytes
        )


class Directory(httpx.AsyncBaseTransport):
    """Finds keepers by the host of a URL; one that is missing refuses."""

    def __init__(self, *keepers: Keeper) -> None:
        self.by_host = {keeper.peer.agent_id: httpx.ASGITransport(keeper.app) for keeper in keepers}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        found = self.by_host.get(request.url.host)
        if found is None:
            raise httpx.ConnectError("refused", request=request)
        return await found.handle_async_request(request)


@asynccontextmanager
async def network(*keepers: Keeper, close: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=Directory(*keepers)) as http:
        yield http
    for keeper in keepers if close else ():
        keeper.store.close(remove=True)
