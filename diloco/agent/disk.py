"""The last rung: copies of snapshots on a disk, each a vault of one generation (`diloco.vault.layout`).

A copy is written under another name, forced to the disk, and renamed: what has a vault's name is whole, and its digests
say so again when it is read. The newest two that all ranks have are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from pathlib import Path

from diloco.agent.vaults import Vaults
from diloco.schema import Rung
from diloco.vault.copies import copy_generation, needs_of
from diloco.vault.errors import CorruptError, VaultError
from diloco.vault.file import VaultFile
from diloco.vault.layout import Generation

logger = logging.getLogger(__name__)

KEPT = 2
ATTEMPTS = 5
"""To copy a generation before the workers have written two newer ones."""
NAME = re.compile(r"(?P<number>\d+)-rank(?P<rank>\d+)\.vault")


class DiskCopies:
    """Of one agent, in a folder of its own for each slot."""

    def __init__(self, directory: Path, vaults: Vaults, *, identity: str, num_ranks: int) -> None:
        self._directory = directory
        self._vaults = vaults
        self._identity = re.sub(r"[^A-Za-z0-9._-]", "-", identity)
        self._num_ranks = num_ranks
        self._saved = 0
        self._complaint = ""

    def save(self) -> None:
        """Copy the newest snapshot, if it is not there yet. What goes wrong is logged, and stops nothing."""
        started_s = time.monotonic()
        try:
            saved = self._save()
        except (VaultError, OSError) as exc:
            if str(exc) != self._complaint:
                logger.warning("no snapshot on disk folder=%s error=%s", self._directory, exc)
            self._complaint = str(exc)
            return
        self._complaint = ""
        if saved is not None:
            logger.info(
                "snapshot on disk step=%d generation=%d total_s=%.1f",
                saved.step,
                saved.number,
                time.monotonic() - started_s,
            )

    def bring_back(self, slot: int) -> None:
        """Have the next workers go on from the newest copy that is whole."""
        for number in self._numbers(slot):
            files = [self._path(slot, number, rank) for rank in range(self._num_ranks)]
            try:
                self._vaults.bring_in(files, Rung.DISK)
            except (VaultError, OSError, IndexError) as exc:
                logger.warning("a snapshot on disk cannot be used generation=%d error=%s", number, exc)
                self._vaults.drop_files()
            else:
                logger.info("going on from a snapshot on disk generation=%d", number)
                return
        logger.warning("no snapshot on disk to go on from folder=%s slot=%d", self._directory, slot)

    def _save(self) -> Generation | None:
        for attempt in range(ATTEMPTS):
            newest = self._vaults.newest()
            if newest is None or newest.number == self._saved:
                return None
            try:
                for rank in range(self._num_ranks):
                    self._save_rank(newest.number, rank)
            except CorruptError:
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                self._saved = newest.number
                self._remove_old(newest.slot)
                return newest
        return None

    def _save_rank(self, number: int, rank: int) -> None:
        source = self._vaults.vault(rank)
        generations = source.generations() if source is not None else ()
        generation = next((each for each in generations if each.number == number), None)
        if source is None or generation is None:
            raise CorruptError(f"generation {number} is over", field="snapshot_dir")
        path = self._path(generation.slot, number, rank)
        unfinished = path.with_suffix(".part")
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        record_bytes = len(generation.model_dump_json()) + 64 * len(generation.parts)
        try:
            with VaultFile.create(unfinished, needs_of(generation), record_bytes=record_bytes) as target:
                copy_generation(source, generation, target)
                target.flush()
            unfinished.rename(path)
            _flush_folder(path.parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                unfinished.unlink()

    def _folder(self, slot: int) -> Path:
        return self._directory / f"{self._identity}-slot{slot}"

    def _path(self, slot: int, number: int, rank: int) -> Path:
        return self._folder(slot) / f"{number}-rank{rank}.vault"

    def _numbers(self, slot: int) -> list[int]:
        """Those of which all ranks have a copy, the newest first."""
        ranks: dict[int, set[int]] = {}
        folder = self._folder(slot)
        for path in folder.iterdir() if folder.is_dir() else ():
            found = NAME.fullmatch(path.name)
            if found is not None:
                ranks.setdefault(int(found["number"]), set()).add(int(found["rank"]))
        wanted = set(range(self._num_ranks))
        return sorted((number for number, have in ranks.items() if wanted <= have), reverse=True)

    def _remove_old(self, slot: int) -> None:
        kept = set(self._numbers(slot)[:KEPT])
        for path in self._folder(slot).iterdir():
            found = NAME.fullmatch(path.name)
            if found is not None and int(found["number"]) not in kept:
                path.unlink()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
