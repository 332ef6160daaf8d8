"""What an agent keeps for others: a vault file per slot and rank, with the two newest generations that were sent whole.

A file has the layout of the vault that it replicates, so that whoever takes the slot over goes on with this very file.
Its memory is allocated with the first offer, and the sum of all is bounded. Files outlive the agent: one that starts
again finds them (`adopt`).
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import xxhash

from diloco.agent.replica_incoming import Incoming, Kept, PartSink
from diloco.agent.replica_wire import MAX_PARTS, ReplicaOffer, ReplicaReply
from diloco.recovery_schema import ReplicaNotice
from diloco.vault.errors import CorruptError, VaultError, VaultFullError
from diloco.vault.file import VaultFile
from diloco.vault.layout import RECORD_HEAD_BYTES, Generation, Layout, Part, RegionNeed
from service.errors import ConflictError, InputError, OverloadedError

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Slot and rank."""


class ReplicaStore:
    """All of one agent. Methods do not wait, but for memory that is allocated and digests that are computed."""

    def __init__(self, directory: Path, *, owner: str, limit_bytes: int) -> None:
        """``owner`` tells the files of several agents in one directory apart."""
        self._directory = directory
        self._prefix = f"wadiloco-replica-{re.sub(r'[^A-Za-z0-9.-]', '_', owner)}"
        self.limit_bytes = limit_bytes
        self.run_id: str | None = None
        """Replicas of other runs are refused; None: not known yet."""
        self._kept: dict[Place, Kept] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(kept.vault.layout.num_bytes for kept in self._kept.values())

    @property
    def slots(self) -> frozenset[int]:
        """Of which there is anything here, whole or not."""
        return frozenset(slot for slot, _ in self._kept)

    def adopt(self) -> None:
        """Take over what a process of this name left behind; what is damaged is removed."""
        for path in sorted(self._directory.glob(f"{self._prefix}.*.vault")):
            found = re.fullmatch(re.escape(self._prefix) + r"\.(\d+)\.(\d+)\.vault", path.name)
            if found is None:
                continue
            try:
                vault = VaultFile.adopt(path)
            except CorruptError as exc:
                logger.warning("replicas cannot be read, removing them path=%s error=%s", path, exc)
                path.unlink(missing_ok=True)
                continue
            except VaultError as exc:
                logger.warning("replicas of another process path=%s error=%s", path, exc)
                continue
            self._adopt_one((int(found[1]), int(found[2])), vault)

    def _adopt_one(self, place: Place, vault: VaultFile) -> None:
        epochs: dict[int, int] = {}
        for generation in vault.generations():
            try:
                vault.verify(generation)
            except CorruptError as exc:
                logger.warning("a replica is damaged slot=%d rank=%d error=%s", *place, exc)
            else:
                epochs[generation.number] = generation.epoch
        if not epochs:
            vault.close(remove=True)
            return
        self._kept[place] = Kept(vault, epoch=max(epochs.values()), epochs=epochs)
        logger.info("replicas found again slot=%d rank=%d generations=%s", *place, sorted(epochs))

    def offer(self, slot: int, rank: int, offer: ReplicaOffer, *, epoch: int) -> ReplicaReply:
        """Begin to receive a generation, or go on with it.

        Raises:
            ConflictError: the sender has lost the slot, or the replica is of another run.
            InputError: the offer contradicts itself.
            OverloadedError: there is no memory for it.
        """
        generation = offer.generation
        self._check(slot, rank, generation)
        place = (slot, rank)
        kept = self._kept.get(place)
        if kept is not None and epoch < kept.epoch:
            raise ConflictError(
                f"{epoch} is below {kept.epoch}, of which replicas of slot {slot} are here",
                field="epoch",
                remedy="register again: another agent has the slot",
            )
        layout = _layout(offer)
        if kept is None or kept.vault.layout != layout:
            kept = self._allocate(place, layout, epoch)
        kept.epoch = epoch
        going_on = kept.incoming
        if going_on is None or not _is_same(going_on.generation, generation):
            whole = self._find(kept, generation.number)
            if whole is not None and _is_same(whole, generation):
                return ReplicaReply(received_bytes=tuple(part.length for part in generation.parts), complete=True)
            going_on = kept.incoming = self._begin(kept, generation)
        if not going_on.is_complete:
            self._commit_if_whole(place, kept, going_on, epoch)
        return ReplicaReply(received_bytes=tuple(going_on.received), complete=going_on.is_complete)

    def _check(self, slot: int, rank: int, generation: Generation) -> None:
        if (generation.slot, generation.rank) != (slot, rank) or rank >= generation.num_ranks:
            raise InputError("is of another slot or rank than the path says", field="generation")
        if len(generation.parts) > MAX_PARTS:
            raise InputError(f"has more than {MAX_PARTS} parts", field="generation")
        if self.run_id is not None and generation.run_id != self.run_id:
            raise ConflictError(f"is of run {generation.run_id}, this is {self.run_id}", field="run_id")

    def _allocate(self, place: Place, layout: Layout, epoch: int) -> Kept:
        before = self._kept.get(place)
        freed = 0 if before is None else before.vault.layout.num_bytes
        wanted = self.allocated_bytes - freed + layout.num_bytes
        if wanted > self.limit_bytes:
            raise OverloadedError(
                f"replicas would take {wanted / 1e6:.0f} MB of {self.limit_bytes / 1e6:.0f}",
                field="replica_limit_mb",
                remedy="raise --replica-limit-mb of this agent, or start another one",
            )
        if before is not None:
            before.vault.close(remove=True)
            del self._kept[place]
        slot, rank = place
        path = self._directory / f"{self._prefix}.{slot}.{rank}.vault"
        try:
            vault = VaultFile.create(path, _needs(layout), record_bytes=_record_need(layout))
        except VaultFullError as exc:
            raise OverloadedError(exc.message, field=exc.field, remedy=exc.remedy) from exc
        kept = self._kept[place] = Kept(vault, epoch=epoch)
        logger.info(
            "memory for replicas slot=%d rank=%d mb=%.1f all_mb=%.1f limit_mb=%.0f",
            *(slot, rank, layout.num_bytes / 1e6, self.allocated_bytes / 1e6, self.limit_bytes / 1e6),
        )
        return kept

    def _find(self, kept: Kept, number: int) -> Generation | None:
        return next((each for each in kept.vault.generations() if each.number == number), None)

    def _begin(self, kept: Kept, generation: Generation) -> Incoming:
        """Choose regions for what is new; the newest generation, and what of it is the same, stays."""
        others = [each for each in kept.vault.generations() if each.number in kept.epochs]
        # Of the same number, from a holder before: there cannot be two.
        whole = [each for each in others if each.number != generation.number]
        newest = max(whole, key=lambda each: (kept.epochs[each.number], each.number), default=None)
        try:
            return self._reserve(kept, generation, newest)
        except VaultFullError:
            # Its parts lie otherwise than in the sender's vault. Rather none for a moment than no new one ever.
            logger.warning("no room beside the last replica, giving it up slot=%d", generation.slot)
            return self._reserve(kept, generation, None)

    def _reserve(self, kept: Kept, generation: Generation, newest: Generation | None) -> Incoming:
        vault = kept.vault
        vault.begin(keep=None if newest is None else newest.number)
        kept.epochs = {} if newest is None else {newest.number: kept.epochs[newest.number]}
        before = {(part.digest, part.length): part for part in (newest.parts if newest is not None else ())}
        same = [before.get((part.digest, part.length)) for part in generation.parts]
        new = [index for index, part in enumerate(same) if part is None]
        regions = vault.reserve(
            [generation.parts[index].length for index in new], kept=[part for part in same if part is not None]
        )
        placed = list(generation.parts)
        for index, part in enumerate(same):
            region = part.region if part is not None else regions[new.index(index)]
            placed[index] = placed[index].model_copy(update={"region": region})
        return Incoming(
            generation=generation.model_copy(update={"parts": tuple(placed)}),
            received=[0 if part is None else part.length for part in same],
            digests=[xxhash.xxh3_128() for _ in same],
        )

    def receiving(self, slot: int, rank: int, number: int, part: int, *, epoch: int) -> PartSink:
        """Where a chunk of a part goes.

        Raises:
            ConflictError: the generation was not offered, or is of a sender that has lost the slot.
            InputError: it has no such part.
        """
        kept = self._kept.get((slot, rank))
        incoming = None if kept is None else kept.incoming
        if kept is None or incoming is None or incoming.generation.number != number:
            raise ConflictError(f"{number} was not offered", field="generation", remedy="offer it first")
        if epoch < kept.epoch:
            raise ConflictError(f"{epoch} is below {kept.epoch}", field="epoch", remedy="register again")
        if part >= len(incoming.received):
            raise InputError(f"there are {len(incoming.received)} parts", field="part")
        return PartSink(kept, incoming, part)

    def progress(self, slot: int, rank: int, *, epoch: int) -> ReplicaReply:
        """After a chunk: commit what is whole, and say what there is.

        Raises:
            InputError: a part is not what was offered; it is to be sent anew.
        """
        place = (slot, rank)
        kept = self._kept[place]
        assert kept.incoming is not None
        self._commit_if_whole(place, kept, kept.incoming, epoch)
        return ReplicaReply(received_bytes=tuple(kept.incoming.received), complete=kept.incoming.is_complete)

    def _commit_if_whole(self, place: Place, kept: Kept, incoming: Incoming, epoch: int) -> None:
        generation = incoming.generation
        if any(got < part.length for got, part in zip(incoming.received, generation.parts, strict=True)):
            return
        for index, part in enumerate(generation.parts):
            digest = incoming.digests[index]
            # Of a part that is kept from before nothing was received.
            if _was_sent(kept, part) and part.length and digest.hexdigest() != part.digest:
                incoming.received[index], incoming.digests[index] = 0, xxhash.xxh3_128()
                raise InputError(
                    f"{part.name} does not match the digest that was offered", field="part", remedy="send it again"
                )
        kept.vault.commit(generation)
        kept.epochs[generation.number] = epoch
        if any(other < epoch and number > generation.number for number, other in kept.epochs.items()):
            # Of a holder that had lost the slot: a worker that restores takes the highest number.
            kept.vault.begin(keep=generation.number)
            kept.epochs = {generation.number: epoch}
        incoming.is_complete = True
        logger.debug("replica complete slot=%d rank=%d generation=%d", *place, generation.number)

    def notices(self) -> tuple[ReplicaNotice, ...]:
        """What is here, and whole."""
        return tuple(
            ReplicaNotice(
                slot=slot,
                rank=rank,
                num_ranks=generation.num_ranks,
                generation=generation.number,
                step=generation.step,
                epoch=kept.epochs[generation.number],
            )
            for (slot, rank), kept in sorted(self._kept.items())
            for generation in kept.vault.generations()
            if generation.number in kept.epochs
        )

    def whole(self, slot: int, rank: int, number: int) -> tuple[VaultFile, Generation]:
        """A generation to read.

        Raises:
            InputError: it is not here (any more).
        """
        kept = self._kept.get((slot, rank))
        found = None if kept is None or number not in kept.epochs else self._find(kept, number)
        if kept is None or found is None:
            raise InputError(f"{number} of slot {slot}, rank {rank} is not here", field="generation")
        return kept.vault, found

    def offer_of(self, slot: int, rank: int, number: int) -> ReplicaOffer:
        """As `whole`, to be told to who fetches it."""
        vault, generation = self.whole(slot, rank, number)
        return ReplicaOffer(layout=base64.b64encode(vault.layout.encode()).decode(), generation=generation)

    def take(self, slot: int, number: int) -> dict[int, Path]:
        """Give up the replicas of a slot, and leave their files, by rank: the slot is this agent's own now.

        They hold generation ``number`` alone: who goes on from them would verify the other one, too.
        """
        paths: dict[int, Path] = {}
        for place in [place for place in self._kept if place[0] == slot]:
            vault = self._kept.pop(place).vault
            vault.begin(keep=number)
            paths[place[1]] = vault.path
            vault.close()
        return paths

    def release(self, keep: Collection[int]) -> None:
        """Free the memory of all slots but these."""
        for place in [place for place in self._kept if place[0] not in keep]:
            self._kept.pop(place).vault.close(remove=True)
            logger.info("replicas released slot=%d rank=%d", *place)

    def close(self, *, remove: bool) -> None:
        """Unmap all; with ``remove`` for good."""
        for kept in self._kept.values():
            kept.vault.close(remove=remove)
        self._kept.clear()

    def chunks(self, vault: VaultFile, part: Part, start: int, stop: int, *, piece: int) -> Iterator[bytes]:
        """Copies of the bytes of a part."""
        view = vault.view(part)
        for at in range(start, stop, piece):
            yield bytes(view[at : min(at + piece, stop)])


def _was_sent(kept: Kept, part: Part) -> bool:
    """Whether the part lies in no committed generation: those were verified when they came."""
    return all(part.region != other.region for each in kept.vault.generations() for other in each.parts)


def _is_same(a: Generation, b: Generation) -> bool:
    """Whether two offers are of the same bytes, wherever they lie."""
    told_a, told_b = ([(p.name, p.length, p.digest) for p in each.parts] for each in (a, b))
    return (a.number, a.instance, a.step) == (b.number, b.instance, b.step) and told_a == told_b


def _layout(offer: ReplicaOffer) -> Layout:
    """Raises `InputError`: it is none."""
    try:
        raw = base64.b64decode(offer.layout, validate=True)
        layout = Layout.decode(raw, file_bytes=int.from_bytes(raw[FILE_BYTES_AT], "little"))
        if Layout.of(_needs(layout), record_bytes=_record_need(layout)) != layout:
            raise InputError("has its regions where none can be", field="layout")
    except (binascii.Error, VaultError, ValueError) as exc:
        raise InputError(f"is no layout of a vault: {exc}", field="layout") from exc
    return layout


FILE_BYTES_AT = slice(16, 24)
"""Where a vault's header says how long the file is."""


def _needs(layout: Layout) -> list[RegionNeed]:
    return [RegionNeed(region.num_bytes, 1) for region in layout.regions]


def _record_need(layout: Layout) -> int:
    return layout.record_bytes - RECORD_HEAD_BYTES
