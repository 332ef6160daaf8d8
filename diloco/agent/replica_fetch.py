"""How the state of a slot comes to the agent that gets it: from what it keeps itself, else from the other keepers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from diloco.agent.replica_client import ReplicaClient
from diloco.agent.replica_store import ReplicaStore
from diloco.recovery_schema import Peer, ReplicaNotice, ReplicaPlace
from service.errors import UnavailableError, WadilocoError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a slot on this host."""

    paths: dict[int, Path]
    """Vaults by rank."""
    generation: int
    step: int
    epoch: int
    """Of whoever sent it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One generation of all ranks, and who has it."""

    epoch: int
    step: int
    number: int
    holders: tuple[tuple[Peer, ...], ...]
    """By rank; nobody where this agent has it itself."""


def candidates_of(
    slot: int, num_ranks: int, own: Iterable[ReplicaNotice], others: Iterable[ReplicaPlace]
) -> list[Candidate]:
    """Generations of which every rank is somewhere, the newest first (pure).

    By epoch, then by step: see `controller.takers`. Of equal ones the order is that of their numbers.
    """
    here: set[tuple[int, int, int, int]] = set()
    there: dict[tuple[int, int, int, int], list[Peer]] = {}
    for notice in own:
        if (notice.slot, notice.num_ranks) == (slot, num_ranks) and notice.complete:
            here.add(_key(notice))
    for place in others:
        notice = place.replica
        if (notice.slot, notice.num_ranks) == (slot, num_ranks) and notice.complete:
            there.setdefault(_key(notice), []).append(place.holder)
    found = []
    for epoch, step, number in {key[:3] for key in here | set(there)}:
        keys = [(epoch, step, number, rank) for rank in range(num_ranks)]
        if all(key in here or key in there for key in keys):
            holders = tuple(() if key in here else tuple(there[key]) for key in keys)
            found.append(Candidate(epoch, step, number, holders))
    return sorted(found, key=lambda each: (each.epoch, each.step, each.number), reverse=True)


def is_newer(candidate: Candidate, epoch: int, step: int) -> bool:
    """Whether it is newer than a snapshot that was taken when the newest epoch heard of was this one (pure).

    What its own holder sent has an epoch no higher than that. A higher one is that of another holder since.
    """
    return candidate.epoch > epoch or candidate.step > step


def _key(notice: ReplicaNotice) -> tuple[int, int, int, int]:
    return notice.epoch, notice.step, notice.generation, notice.rank


class ReplicaFetcher:
    """Fetches into the agent's own store, and takes from there."""

    def __init__(self, http: httpx.AsyncClient, store: ReplicaStore, *, own_id: str, timeout_s: float) -> None:
        self._http = http
        self._store = store
        self._own_id = own_id
        self._timeout_s = timeout_s

    async def obtain(
        self,
        slot: int,
        num_ranks: int,
        places: Sequence[ReplicaPlace],
        *,
        epoch: int,
        refused: list[str],
        better_than: tuple[int, int] | None = None,
    ) -> Found | None:
        """The newest state of the slot that can be had, ready to be used; None where there is none.

        Why something newer cannot be had is added to ``refused``. ``better_than``: epoch and step of what is there.
        """
        others = [place for place in places if place.holder.agent_id != self._own_id]
        for candidate in candidates_of(slot, num_ranks, self._store.notices(), others):
            if better_than is not None and not is_newer(candidate, *better_than):
                return None
            try:
                for rank, holders in enumerate(candidate.holders):
                    await self._fetch_rank(slot, rank, candidate, holders, epoch=epoch)
                await asyncio.to_thread(self._check, slot, num_ranks, candidate)
            except WadilocoError as exc:
                refused.append(f"replica at step {candidate.step}: {exc}")
                logger.warning("replica cannot be used slot=%d step=%d error=%s", slot, candidate.step, exc)
                continue
            paths = self._store.take(slot, candidate.number)
            return Found(paths, candidate.number, candidate.step, candidate.epoch)
        if not refused:
            refused.append("no replica of the slot is known")
        return None

    def _check(self, slot: int, num_ranks: int, candidate: Candidate) -> None:
        """Raises `WadilocoError`: it is not as it was when it came."""
        for rank in range(num_ranks):
            vault, generation = self._store.whole(slot, rank, candidate.number)
            vault.verify(generation)

    async def _fetch_rank(
        self, slot: int, rank: int, candidate: Candidate, holders: Sequence[Peer], *, epoch: int
    ) -> None:
        if not holders:
            return
        failures: list[str] = []
        for holder in holders:
            try:
                await self._fetch_from(holder, slot, rank, candidate.number, epoch=epoch)
            except WadilocoError as exc:
                failures.append(f"{holder.agent_id}: {exc}")
                logger.warning("replica not fetched slot=%d rank=%d error=%s", slot, rank, failures[-1])
            else:
                return
        raise UnavailableError("; ".join(failures), field="replica")

    async def _fetch_from(self, holder: Peer, slot: int, rank: int, number: int, *, epoch: int) -> None:
        """One rank's generation from one holder, chunk by chunk into the own store."""
        client = ReplicaClient(self._http, holder.url, timeout_s=self._timeout_s)
        offer = await client.describe(slot, rank, number)
        generation = offer.generation
        if (generation.slot, generation.rank, generation.number) != (slot, rank, number):
            raise UnavailableError("is of something else than was asked for", field="replica")
        reply = await asyncio.to_thread(self._store.offer, slot, rank, offer, epoch=epoch)
        for index, part in enumerate(generation.parts):
            while (start := reply.received_bytes[index]) < part.length:
                data, digest = await client.fetch(generation, index, start)
                sink = self._store.receiving(slot, rank, number, index, epoch=epoch)
                sink.write(data)
                sink.finish(digest)
                reply = self._store.progress(slot, rank, epoch=epoch)
        if not reply.complete:
            raise UnavailableError("is not whole", field="replica")
