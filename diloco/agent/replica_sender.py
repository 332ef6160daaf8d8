"""Keeps the replicas at the buddies as new as they can be, without ever holding up the training.

For each buddy one task takes the newest generation that all ranks have committed, copies what of it is new to memory of
its own (the worker overwrites the generation after the next), and sends it chunk by chunk. One generation is under way
at a time; those that are committed meanwhile are skipped, but for the newest. A buddy that is slow or gone costs
nothing but its own replica.

Chunks take turns with pauses as long as they took themselves (`SHARE`), and before each there is a look at the gate of
the server on the same hardware, for whose lull they wait a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from diloco.agent.own_vaults import OwnVaults, StaleGenerationError, copy_parts
from diloco.agent.replica_client import ReplicaClient, make_offer
from diloco.agent.replica_wire import CHUNK_BYTES, ReplicaReply
from diloco.agent.rules import backoff_s
from diloco.digest import ByteRange
from diloco.lull import Gate
from diloco.recovery_schema import Peer, SentReplica
from diloco.vault.file import VaultFile
from diloco.vault.layout import Generation
from service.errors import ConflictError, UnavailableError, WadilocoError
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""Between two looks for a new generation: two reads of shared memory per rank."""
FOLLOW_S = 0.1
"""Between two looks for other buddies."""
SHARE = 0.5
"""Of the time in which something is to be sent."""
LULL_LOOKS = 25
"""Half a second, the longest wait of one chunk for a lull: beside a server that never rests a replica comes slowly."""
RETRY_FIRST_S = 0.25
RETRY_LONGEST_S = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """The own slot's vaults as of now, by rank."""

    epoch: int
    """Of the lease: what is sent is fenced with it."""
    paths: tuple[Path, ...]


@dataclass(slots=True)
class Line:
    """What goes to one buddy."""

    peer: Peer
    told: SentReplica
    buffers: list[bytearray] = field(default_factory=list)
    """By rank: copies of what is being sent."""
    task: asyncio.Task[None] | None = None


class ReplicaSender:
    """The replicas of one agent's own slot."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        source: Callable[[], Source | None],
        *,
        timeout_s: float,
        gate: Gate | None = None,
    ) -> None:
        """``source`` tells the vaults of the slot that the agent holds now; None while there are none."""
        self._http = http
        self._source = source
        self._timeout_s = timeout_s
        self._gate = gate
        self._vaults = OwnVaults()
        self._lines: dict[Peer, Line] = {}

    async def run(self, buddies: Callable[[], Sequence[Peer]], exit_event: asyncio.Event) -> None:
        """Serve the buddies that there are, as they change, until ``exit_event``."""
        try:
            self._follow(buddies())
            while not await wait_for_exit(exit_event, FOLLOW_S):
                self._follow(buddies())
        finally:
            self._follow(())
            self._vaults.close()

    def told(self) -> tuple[SentReplica, ...]:
        """How far each buddy is."""
        source = self._source()
        own = None if source is None else self._vaults.newest(source.paths)
        newest = None if own is None else next(iter(own.values())).step
        return tuple(_behind(line.told, newest) for line in self._lines.values())

    async def send_newest(self, peer: Peer, *, at_least: int, deadline_s: float) -> bool:
        """Send at once, without pauses, a generation of at least this number; whether it was complete in time.

        ``deadline_s`` is monotonic.
        """
        self._drop(peer)  # its task would be in the way; it comes again with the next look
        line = Line(peer, SentReplica(buddy=peer.agent_id))
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    number = await self._send_one(line, after=at_least - 1, in_haste=True)
            except (TimeoutError, ConflictError) as exc:
                logger.warning("state not sent buddy=%s error=%s", peer.agent_id, exc or "out of time")
                return False
            except (WadilocoError, OSError) as exc:
                logger.info("state not sent, trying on buddy=%s error=%s", peer.agent_id, exc)
                number = None
            if number is not None:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _follow(self, buddies: Sequence[Peer]) -> None:
        for peer in set(self._lines) - set(buddies):
            self._drop(peer)
            logger.info("no buddy any more agent=%s", peer.agent_id)
        for peer in buddies:
            if peer not in self._lines:
                line = self._lines[peer] = Line(peer, SentReplica(buddy=peer.agent_id))
                line.task = asyncio.create_task(self._serve(line), name=f"replica at {peer.agent_id}")

    def _drop(self, peer: Peer) -> None:
        line = self._lines.pop(peer, None)
        if line is not None and line.task is not None:
            line.task.cancel()

    async def _serve(self, line: Line) -> None:
        """Send one generation after another for ever; failures are told and tried again."""
        newest, failures = 0, 0
        source: Source | None = None
        while True:
            if (now := self._source()) != source:
                source, newest = now, 0
            try:
                number = await self._send_one(line, after=newest, in_haste=False)
            except StaleGenerationError:
                number = None
            except (WadilocoError, OSError) as exc:
                failures += 1
                self._note_failure(line, exc, failures)
                await asyncio.sleep(backoff_s(failures, first_s=RETRY_FIRST_S, longest_s=RETRY_LONGEST_S))
                continue
            except Exception:
                logger.exception("replica not sent buddy=%s", line.peer.agent_id)
                await asyncio.sleep(RETRY_LONGEST_S)
                continue
            if number is None:
                await asyncio.sleep(POLL_S)
                continue
            newest, failures = number, 0

    def _note_failure(self, line: Line, exc: Exception, failures: int) -> None:
        line.told = line.told.model_copy(update={"failure": str(exc)[:500]})
        level = logging.WARNING if failures % 20 == 1 else logging.DEBUG
        buddy = line.peer.agent_id
        logger.log(level, "replica not sent, trying on buddy=%s failures=%d error=%s", buddy, failures, exc)

    async def _send_one(self, line: Line, *, after: int, in_haste: bool) -> int | None:
        """Send the newest generation that all ranks have; its number, None if there is none after ``after``.

        Raises:
            StaleGenerationError: it was overwritten meanwhile.
            WadilocoError: it could not be sent.
        """
        source = self._source()
        if source is None or self._vaults.newest_number(source.paths) <= after:
            return None
        found = self._vaults.newest(source.paths)
        if found is None:
            return None
        newest = next(iter(found.values()))
        if newest.number <= after:
            return None
        client = ReplicaClient(self._http, line.peer.url, timeout_s=self._timeout_s)
        sent_bytes = 0
        for rank, (path, generation) in enumerate(found.items()):
            vault = self._vaults.get(path)
            if vault is None:
                raise UnavailableError(f"{path} is gone", field="vault")
            sending = Sending(vault, generation, rank, source.epoch)
            sent_bytes += await self._send(client, line, sending, in_haste=in_haste)
        line.told = SentReplica(
            buddy=line.peer.agent_id,
            generation=newest.number,
            step=newest.step,
            generations=line.told.generations + 1,
            sent_bytes=line.told.sent_bytes + sent_bytes,
        )
        return newest.number

    async def _send(self, client: ReplicaClient, line: Line, sending: Sending, *, in_haste: bool) -> int:
        """Bytes sent until one rank's generation was complete."""
        generation, epoch = sending.generation, sending.epoch
        reply = await client.offer(make_offer(sending.vault.layout, generation), epoch=epoch)
        wanted = [index for index, part in enumerate(generation.parts) if reply.received_bytes[index] < part.length]
        buffer = line_buffer(line, sending.rank, sum(generation.parts[index].length for index in wanted))
        copied = await asyncio.to_thread(copy_parts, sending.vault, generation, wanted, buffer)
        sent_bytes = 0
        for index, data in copied.items():
            while (start := reply.received_bytes[index]) < len(data):
                sent_s = time.monotonic()
                piece = bytes(data[start : start + CHUNK_BYTES])
                at = ByteRange(start, start + len(piece), len(data))
                reply = await client.send(generation, index, at, piece, epoch=epoch)
                _check_reply(reply, generation)
                sent_bytes += len(piece)
                await self._give_way(time.monotonic() - sent_s, in_haste=in_haste)
        if not reply.complete:
            raise UnavailableError("has all bytes and does not say so", field="buddy")
        return sent_bytes

    async def _give_way(self, took_s: float, *, in_haste: bool) -> None:
        if in_haste:
            return
        await asyncio.sleep(took_s * (1 - SHARE) / SHARE)
        for _ in range(LULL_LOOKS):
            if self._gate is None or not self._gate.read(time.monotonic()).busy:
                return
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Sending:
    """One rank's part of what is sent."""

    vault: VaultFile
    generation: Generation
    rank: int
    epoch: int


def line_buffer(line: Line, rank: int, num_bytes: int) -> bytearray:
    """Memory for copies; kept, and larger only where more is sent than ever before."""
    while len(line.buffers) <= rank:
        line.buffers.append(bytearray())
    if num_bytes > len(line.buffers[rank]):
        line.buffers[rank] = bytearray(num_bytes)
        logger.info("memory to send from buddy=%s rank=%d mb=%.1f", line.peer.agent_id, rank, num_bytes / 1e6)
    return line.buffers[rank]


def _check_reply(reply: ReplicaReply, generation: Generation) -> None:
    """Raises `UnavailableError`: it is about something else."""
    if len(reply.received_bytes) != len(generation.parts):
        raise UnavailableError("the answer is about another generation", field="buddy")


def _behind(told: SentReplica, newest: int | None) -> SentReplica:
    if newest is None or told.step is None:
        return told
    return told.model_copy(update={"steps_behind": max(0, newest - told.step)})
