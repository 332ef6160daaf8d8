"""A run: its fragments, which begin together with one offer, and what they share: the disk, and the limit of uploads.

Each fragment is an `OuterRun` with rounds of its own. A run has one, which is the whole model, unless the offer that it
begins with says more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from torch import Tensor

from diloco.fragment import num_bytes
from diloco.partition import joined
from diloco.schema import InitReply, Manifest, OuterState
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.generation import Outcome, new_run
from diloco.synchronizer.intake import Intake
from diloco.synchronizer.layout import begin_fragments, count_fragments, folder_of
from diloco.synchronizer.metrics import Metrics
from diloco.synchronizer.offer import begin_offer, check_offer, read_offer
from diloco.synchronizer.outer_run import OuterRun
from diloco.synchronizer.outer_state import delay_of
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
        self._manifest: Manifest | None = None
        self._fragments: tuple[OuterRun, ...] = ()
        self._fragments = self._open(1)
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
        number = count_fragments(self._settings.directory)
        fragments = self._open(number)
        loaded = [fragment.load() for fragment in fragments]
        if all(loaded):
            self._begin(fragments)
        elif number == 1:
            logger.info("waiting for initial parameters directory=%s", self._settings.directory)
        else:
            raise ConfigError(
                f"{folder_of(self._settings.directory, loaded.index(False), number)} has no generation",
                field="directory",
                remedy="restore it from a backup, or choose another --directory",
            )

    def fragment(self, number: int) -> OuterRun:
        """Raises `InputError` when the run has no such fragment; one that has not begun has the first."""
        if number >= len(self._fragments):
            raise InputError(
                f"there is no fragment {number}, the run has {len(self._fragments)}",
                field="fragment",
                remedy="start all islands and the controller with the same --num-fragments",
            )
        return self._fragments[number]

    async def offer(self, chunk: Chunk) -> InitReply:
        """Take a chunk of somebody's initial parameters; the first offer to be complete starts the run.

        Raises:
            ManifestError: the run has another model, or other fragments.
        """
        async with self._offer_lock:
            if chunk.start == 0:
                current = [fragment.manifest for fragment in self._fragments if fragment.manifest is not None]
                check_offer(chunk, current=current, max_bytes=self._settings.max_contribution_bytes)
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
            await self._initialize(*received[1])
            return InitReply(accepted=True, version=0, received_bytes=chunk.total, run=self._fragments[0].run)

    def note_arrival(self, slot: int, round_number: int, *, fragment: int) -> None:
        """See `OuterRun.note_arrival`; a fragment that there is not tells nothing."""
        if fragment < len(self._fragments):
            self._fragments[fragment].note_arrival(slot, round_number)

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
            manifest=self._manifest,
            fragments=tuple(state for state in states if state is not None),
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

    async def _initialize(self, manifests: tuple[Manifest, ...], parameters: Tensor) -> None:
        settings = self._settings
        outcome = Outcome(run=new_run(), outer_lr=settings.outer_lr, outer_momentum=settings.outer_momentum)
        with self._disk.writing():
            begun = await asyncio.to_thread(begin_fragments, settings.directory, manifests, parameters, outcome=outcome)
        fragments = self._open(len(manifests)) if len(manifests) > 1 else self._fragments
        for fragment, (generation, values, momentum) in zip(fragments, begun, strict=True):
            fragment.start(generation, values, momentum)
        self._begin(fragments)
        assert self._manifest is not None
        logger.info(
            "run starts fragments=%d tensors=%d bytes=%d",
            len(fragments),
            len(self._manifest.tensors),
            num_bytes(self._manifest),
        )

    def _begin(self, fragments: tuple[OuterRun, ...]) -> None:
        self._fragments = fragments
        self._manifest = joined([fragment.manifest for fragment in fragments if fragment.manifest is not None])
        self._offers.discard_unless(lambda _: False)
        self._begun.set()

    def _open(self, number: int) -> tuple[OuterRun, ...]:
        """The fragments of a run that has so many, without anything in them."""
        return tuple(self._open_one(fragment, number) for fragment in range(number))

    def _open_one(self, fragment: int, number: int) -> OuterRun:
        disk = Disk(folder_of(self._settings.directory, fragment, number), whole=self._disk)
        return OuterRun(
            self._settings,
            self._metrics,
            fragment=fragment,
            disk=disk,
            intake=self._offers.beside(disk, scope=f"fragment-{fragment}-"),
            published=self._fragments[0].published if self._fragments and fragment == 0 else None,
            clock=self._clock,
        )
