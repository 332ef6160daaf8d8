"""A run: its fragments, which begin together with one offer, and what they share: the disk, and the limit of uploads.

Each fragment is an `OuterRun` with rounds of its own. A run has one, which is the whole model, unless the offer that it
begins with says more. Of a run that several synchronizers share (`diloco.sharding`) this holds its own fragments, and
knows what the others are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from diloco.fragment import num_bytes
from diloco.partition import cut, joined
from diloco.schema import InitReply, Manifest, OuterState, ShardState
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.generation import Outcome, new_run
from diloco.synchronizer.intake import Intake
from diloco.synchronizer.layout import begin_fragments, count_fragments, folder_of
from diloco.synchronizer.metrics import Metrics
from diloco.synchronizer.offer import Offered, begin_offer, check_offer, read_offer
from diloco.synchronizer.outer_run import OuterRun
from diloco.synchronizer.outer_state import delay_of
from diloco.synchronizer.shard_file import ShardRecord, read_shard
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import Chunk, Name
from service.deadline import unless
from service.errors import ConfigError, InputError

logger = logging.getLogger(__name__)

SPARE_UPLOADS = 8
"""Uploads in progress beyond one per slot of the quorum: offers, and slots that come and go."""


class Run:
    """What one synchronizer holds."""

    def __init__(
        self, settings: SynchronizerSettings, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._disk = Disk(settings.directory)
        self._offers = Intake(self._disk, metrics, limit=settings.quorum + SPARE_UPLOADS)
        self._offer_lock = asyncio.Lock()
        self._begun = asyncio.Event()
        self._shard = settings.place
        self._record: ShardRecord | None = None
        """What is known of a run that this synchronizer shares with others."""
        self._cut: tuple[Manifest, ...] = ()
        """Of all fragments of the run, also of those that live elsewhere; none before it has begun."""
        self._fragments: tuple[OuterRun, ...] = ()
        self._fragments = (self._open_one(self._first, 1),)
        metrics.open_contributions.set_function(lambda: sum(f.num_contributions for f in self._fragments))
        metrics.grace_seconds.set_function(lambda: max(f.grace_s for f in self._fragments))

    @property
    def problem(self) -> str | None:
        """Why the last outer step of a fragment, or the last write, failed; None when none did."""
        return next((fragment.problem for fragment in self._fragments if fragment.problem is not None), None)

    def load(self) -> None:
        """Go on from the directory, where there is a run.

        Raises:
            ConfigError: one of its fragments is missing.
        """
        directory = self._settings.directory
        if self._shard is None:
            number = count_fragments(directory)
        else:
            record = read_shard(directory, self._shard)
            number = 1 if record is None else record.num_fragments
            self._record = record
        fragments = self._open(number) if number > 1 else self._fragments
        loaded = [fragment.load() for fragment in fragments]
        if all(loaded):
            self._begin(fragments)
        elif number == 1:
            logger.info("waiting for initial parameters directory=%s shard=%s", directory, self._shard)
        else:
            raise ConfigError(
                f"{folder_of(directory, fragments[loaded.index(False)].fragment, number)} has no generation",
                field="directory",
                remedy="restore it from a backup, or choose another --directory",
            )

    def fragment(self, number: int) -> OuterRun:
        """Raises `InputError` when the run has no such fragment, or it lives on another synchronizer; before a run has
        begun, there is the first that can live here."""
        found = next((fragment for fragment in self._fragments if fragment.fragment == number), None)
        if found is not None:
            return found
        if self._shard is not None and not self._shard.owns(number):
            raise InputError(
                f"fragment {number} does not live here: this is shard {self._shard}, and it lives on shard"
                f" {number % self._shard.count}",
                field="fragment",
                remedy="give islands the URLs of all synchronizers, in the order of their --shard",
            )
        raise InputError(
            f"there is no fragment {number}, the run has {max(len(self._cut), 1)}",
            field="fragment",
            remedy="start all islands and the controller with the same --num-fragments",
        )

    async def offer(self, chunk: Chunk, *, fragment: int = 0) -> InitReply:
        """Take a chunk of somebody's initial parameters; the first offer to be complete starts the run.

        It comes to the first ``fragment`` that lives here.

        Raises:
            ManifestError: the run has another model, or other fragments.
            InputError: it is for another synchronizer.
        """
        if fragment != self._first:
            self.fragment(fragment)
            raise InputError(f"an offer comes to fragment {self._first} here", field="fragment")
        async with self._offer_lock:
            if chunk.start == 0:
                limit = self._settings.max_contribution_bytes
                check_offer(chunk, current=self._cut, max_bytes=limit, shard=self._shard)
            if self._begun.is_set():
                return InitReply(accepted=False, version=self._fragments[0].version, run=self._fragments[0].run)
            directory = self._settings.directory
            name = Name(f"offer-{chunk.digest.hex()[:16]}")
            received = await self._offers.receive(
                name, None, chunk, begin=lambda: begin_offer(directory, name, chunk), verify=read_offer
            )
            if received is None or received[1] is None:
                received_bytes = received[0].received if received else 0
                return InitReply(accepted=False, version=0, received_bytes=received_bytes, complete=False)
            await self._initialize(received[1])
            return InitReply(accepted=True, version=0, received_bytes=chunk.total, run=self._fragments[0].run)

    def note_arrival(self, slot: int, round_number: int, *, fragment: int) -> None:
        """See `OuterRun.note_arrival`; a fragment that there is not tells nothing."""
        for one in self._fragments:
            if one.fragment == fragment:
                one.note_arrival(slot, round_number)

    def state(self, *, slot: int | None = None) -> OuterState:
        """As a slot sees it."""
        settings, rules = self._settings, self._settings.round_rules
        states = (fragment.state(slot=slot) for fragment in self._fragments)
        return OuterState(
            initialized=self._begun.is_set(),
            quorum=settings.quorum,
            outer_lr=settings.outer_lr,
            outer_momentum=settings.outer_momentum,
            outer_delay=1 if (delay := delay_of(settings)) is None else delay.num_steps,
            max_staleness=rules.max_staleness,
            pull_codec=settings.pull_codec,
            round_timeout_s=rules.timeout_s,
            manifest=joined(self._cut) if self._cut else None,
            fragments=tuple(state for state in states if state is not None),
            shard=self._shard_state,
        )

    async def close_rounds(self, exit_event: asyncio.Event) -> None:
        """Close the rounds of all fragments as they become due, until the exit."""
        await unless(exit_event, self._begun.wait())
        async with asyncio.TaskGroup() as group:
            for fragment in self._fragments:
                group.create_task(fragment.close_rounds(exit_event))

    async def announce_exit(self, exit_event: asyncio.Event) -> None:
        """Release everyone who waits for a version when the process ends."""
        await exit_event.wait()
        for fragment in self._fragments:
            fragment.published.notify()

    async def _initialize(self, offered: Offered) -> None:
        settings, offer = self._settings, offered.offer
        outcome = Outcome(run=new_run(), outer_lr=settings.outer_lr, outer_momentum=settings.outer_momentum)
        if offer.part is not None:
            self._record = ShardRecord(
                shard=offer.part.shard,
                num_fragments=offer.num_fragments,
                manifest=offer.manifest,
                origin=offer.part.origin,
            )
        begin = partial(begin_fragments, outcome=outcome, record=self._record)
        with self._disk.writing():
            begun = await asyncio.to_thread(begin, settings.directory, offered.manifests, offered.parameters)
        fragments = self._open(offer.num_fragments) if offer.num_fragments > 1 else self._fragments
        for fragment, (generation, values, momentum) in zip(fragments, begun, strict=True):
            fragment.start(generation, values, momentum)
        self._begin(fragments)
        logger.info(
            "run starts fragments=%d tensors=%d bytes=%d shard=%s",
            len(fragments),
            sum(len(manifest.tensors) for manifest in offered.manifests),
            num_bytes(offer.offered),
            self._shard,
        )

    def _begin(self, fragments: tuple[OuterRun, ...]) -> None:
        self._fragments = fragments
        if self._record is None:
            self._cut = tuple(fragment.manifest for fragment in fragments if fragment.manifest is not None)
        else:
            self._cut = cut(self._record.manifest, self._record.num_fragments)
        self._offers.discard_unless(lambda _: False)
        self._begun.set()

    @property
    def _first(self) -> int:
        """The first fragment that can live here, whatever their number."""
        return 0 if self._shard is None else self._shard.index

    @property
    def _shard_state(self) -> ShardState | None:
        if self._record is not None and self._begun.is_set():
            return self._record.state
        return None if self._shard is None else ShardState(index=self._shard.index, num_shards=self._shard.count)

    def _open(self, number: int) -> tuple[OuterRun, ...]:
        """The fragments that live here of a run that has so many, without anything in them."""
        own = range(number) if self._shard is None else self._shard.fragments_of(number)
        return tuple(self._open_one(fragment, number) for fragment in own)

    def _open_one(self, fragment: int, number: int) -> OuterRun:
        disk = Disk(folder_of(self._settings.directory, fragment, number), whole=self._disk)
        return OuterRun(
            self._settings,
            self._metrics,
            fragment=fragment,
            disk=disk,
            intake=self._offers.beside(disk, scope=f"fragment-{fragment}-"),
            published=self._fragments[0].published if self._fragments and fragment == self._first else None,
            clock=self._clock,
        )
