"""What islands can see of the global parameters: the generations that are kept, and the wait for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import time

from diloco.errors import NotInitializedError, VersionGoneError
from diloco.schema import Applied
from diloco.synchronizer.generation import NUM_KEPT, Generation


class Published:
    """The newest generations, and those who wait for a change."""

    def __init__(self, *, num_kept: int = NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._generations: dict[int, Generation] = {}
        self._changed = asyncio.Event()

    @property
    def newest(self) -> Generation | None:
        return self._generations[max(self._generations)] if self._generations else None

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(self._generations)

    @property
    def depth(self) -> int:
        """How many versions back from the newest the parameters are there without a gap."""
        version = newest = max(self._generations)
        while version - 1 in self._generations:
            version -= 1
        return newest - version

    def merged_version(self, slot: int) -> int:
        """Version that the slot's last contribution was merged into; 0 when it has none."""
        last = self._last(slot)
        return 0 if last is None else last.into + 1

    def round_with(self, slot: int, digest: bytes, *, against: int) -> int | None:
        """Round that took this very contribution to version ``against``; None when none did.

        The slot's last one is known for ever, those before as long as their generations are kept.
        """
        made, last = digest.hex(), self._last(slot)
        if last is not None and (last.round, last.digest) == (against, made):
            return last.into
        later = sorted(version for version in self._generations if version > against)
        return next((v - 1 for v in later if self._generations[v].outcome.applied.get(slot) == made), None)

    def _last(self, slot: int) -> Applied | None:
        return None if self.newest is None else self.newest.outcome.last.get(slot)

    def get(self, version: int | None) -> Generation:
        """The generation of that version, or the newest."""
        newest = self.newest
        if newest is None:
            raise NotInitializedError(
                "there are no global parameters yet", field="fragment", remedy="offer initial ones first"
            )
        if version is None:
            return newest
        if version not in self._generations:
            raise VersionGoneError(
                f"version {version} is not kept, the newest is {newest.version}",
                version=newest.version,
                field="version",
            )
        return self._generations[version]

    def chain(self, base_version: int, generation: Generation) -> tuple[Generation, ...]:
        """The generations whose deltas lead from ``base_version`` to this one; none where it takes fewer bytes whole,
        or where one of them is not kept, or has no delta."""
        links = [self._generations.get(version) for version in range(base_version + 1, generation.version)]
        chain = [*links, generation] if base_version < generation.version else []
        known = tuple(link for link in chain if link is not None and link.delta is not None)
        num_bytes = sum(link.delta.num_bytes for link in known if link.delta is not None)
        return known if len(known) == len(chain) and num_bytes < generation.num_bytes else ()

    def add(self, generation: Generation) -> None:
        """Let everybody have the generation, which is on disk; `notify` then tells them."""
        self._generations[generation.version] = generation
        for version in sorted(self._generations)[: -self._num_kept]:
            del self._generations[version]

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float | None) -> None:
        """Return at the next change, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_newer(self, after_version: int, *, wait_s: float, exit_event: asyncio.Event) -> Generation | None:
        """The newest generation once it is newer than that; None when the time, or the process, ends before."""
        deadline_s = time.monotonic() + wait_s
        while True:
            newest = self.newest
            if newest is not None and newest.version > after_version:
                return newest
            left_s = deadline_s - time.monotonic()
            if exit_event.is_set() or left_s <= 0:
                return None
            await self.wait_change(left_s)
