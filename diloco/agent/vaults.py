"""The vaults of the agent's ranks: made when a worker says how large, kept over its death, removed at an orderly end.

A vault is a file in shared memory whose name says whose it is. Agents that were killed leave theirs: the same agent,
started again, takes them over, if the run is the same.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.protocol import RegionSize, VaultPlace
from diloco.schema import Rung
from diloco.vault.copies import copy_generation
from diloco.vault.errors import VaultError
from diloco.vault.file import VaultFile, remove_dead
from diloco.vault.layout import RECORD_HEAD_BYTES, Generation, RegionNeed

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the memory itself; files are private, and never followed)
MAX_NAMESAKES = 8
"""Agents of one name and slot on one host, as in tests: each next one has a number in its vault's name."""
FORGOTTEN_S = 86_400.0
"""Nobody comes back for a vault that was not written to for so long."""
SUFFIX = ".vault"


class Vaults:
    """One per rank of the slot that the agent holds."""

    def __init__(self, directory: Path | None, *, identity: str, num_ranks: int, instance: str) -> None:
        """``directory`` None takes shared memory, or temporary files where there is none."""
        self._directory = directory or _default_directory()
        self._identity = re.sub(r"[^A-Za-z0-9._-]", "-", identity)
        self._instance = instance
        self._vaults: list[VaultFile | None] = [None] * num_ranks
        self._slot: int | None = None
        self._first_number = 0
        self._verified = 0
        """Generation that was digested when it was installed, until a worker has started on it."""
        self.rung = Rung.VAULT
        """Where the newest generation is from, until the workers have made one."""

    @property
    def num_bytes(self) -> int:
        """Of all together."""
        return sum(vault.layout.num_bytes for vault in self._vaults if vault is not None)

    @property
    def directory(self) -> Path:
        return self._directory

    def vault(self, rank: int) -> VaultFile | None:
        """That of a rank, to be read."""
        return self._vaults[rank]

    def newest(self) -> Generation | None:
        """The newest generation whose record is whole on all ranks, as the first rank has it."""
        common: set[int] | None = None
        for vault in self._vaults:
            numbers = {g.number for g in vault.generations()} if vault is not None else set()
            common = numbers if common is None else common & numbers
        first = self._vaults[0]
        if first is None or not common:
            return None
        return next(g for g in first.generations() if g.number in common)

    def take_slot(self, slot: int, *, adopt: bool, run_id: str) -> None:
        """Begin with this slot: forget what there was of another; with ``adopt``, take over what a dead agent left."""
        if slot == self._slot:
            return
        self.drop()
        self._slot = slot
        if adopt:
            self._adopt(run_id)
        _remove_forgotten(self._directory)

    def bring_in(self, files: Sequence[Path], rung: Rung) -> None:
        """Copy the vault of each rank from somewhere else into memory, for the next workers to go on from.

        Raises:
            VaultError, OSError: there is no room for them, or one is no vault.
        """
        self.drop_files()
        for rank, file in enumerate(files):
            with VaultFile.open(file) as source:
                needs = [RegionNeed(region.num_bytes, 1) for region in source.layout.regions]
                vault = self._create(rank, needs, source.layout.record_bytes - RECORD_HEAD_BYTES)
                self._vaults[rank] = vault
                copy_generation(source, source.generations()[0], vault)
        self.rung = rung

    def places(self, *, run_id: str, epoch: int, restore: bool) -> list[VaultPlace]:
        """What the next workers are told, by rank. They number their generations alike from the same number on."""
        newest, first_number = self.newest(), self._next_number()
        is_own = newest is not None and newest.instance == self._instance
        return [
            VaultPlace(
                path=None if vault is None else vault.path,
                restore=restore,
                rung=Rung.VAULT if is_own else self.rung,
                is_own=is_own,
                run_id=run_id,
                instance=self._instance,
                epoch=epoch,
                first_number=first_number,
                verified=self._verified,
            )
            for vault in self._vaults
        ]

    def distrust(self) -> None:
        """A worker has been at the vaults: what was verified before is to be verified again."""
        self._verified = 0

    def make(self, rank: int, regions: Sequence[RegionSize], record_bytes: int) -> Path:
        """Make the vault of a rank, in place of the one that it has.

        Raises:
            VaultError: there is no room, or the folder cannot be written to.
        """
        self._next_number()
        before, self._vaults[rank] = self._vaults[rank], None
        if before is not None:
            before.close(remove=True)
        needs = [RegionNeed(each.num_bytes, each.count) for each in regions]
        vault = self._create(rank, needs, record_bytes)
        self._vaults[rank] = vault
        logger.info("vault rank=%d mb=%.1f path=%s", rank, vault.layout.num_bytes / 1e6, vault.path)
        return vault.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """By rank; none while one is missing."""
        found = [vault.path for vault in self._vaults if vault is not None]
        return tuple(found) if len(found) == len(self._vaults) else ()

    def install(self, paths: Mapping[int, Path], *, verified: int = 0) -> None:
        """Let these replicas, by rank, be the vaults of the slot, in place of those that there are.

        ``verified`` is the number of the generation whose digests have just been found to be right on all ranks.

        Raises:
            VaultError: they cannot be mapped or moved.
        """
        self.drop_files()
        for rank, path in paths.items():
            own = self._path(rank, 0)
            try:
                remove_dead(own)
                path.rename(own)
            except OSError as exc:
                raise VaultError(f"cannot move {path} to {own}: {exc.strerror}", field="vault_dir") from exc
            self._vaults[rank] = VaultFile.adopt(own)
        self.rung, self._verified = Rung.REPLICA, verified

    def drop(self) -> None:
        """Remove all: the slot is another's, or the agent ends in order."""
        self.drop_files()
        self._slot = None

    def drop_files(self) -> None:
        """Remove all, for others in their place."""
        self._next_number()
        for vault in self._vaults:
            if vault is not None:
                vault.close(remove=True)
        self._vaults = [None] * len(self._vaults)
        self.rung, self._verified = Rung.VAULT, 0

    def _next_number(self) -> int:
        """Above all numbers that there were, on this host and on others whose clocks are about right."""
        newest = max((vault.newest_number() for vault in self._vaults if vault is not None), default=0)
        self._first_number = max(self._first_number, newest, int(time.time() * 1000))
        return self._first_number

    def _path(self, rank: int, namesake: int) -> Path:
        more = f"-{namesake}" if namesake else ""
        return self._directory / f"wadiloco-{self._identity}-slot{self._slot}-rank{rank}{more}{SUFFIX}"

    def _create(self, rank: int, needs: list[RegionNeed], record_bytes: int) -> VaultFile:
        for namesake in range(MAX_NAMESAKES):
            try:
                return VaultFile.create(self._path(rank, namesake), needs, record_bytes=record_bytes)
            except VaultError as exc:
                if "lives" not in exc.message or namesake == MAX_NAMESAKES - 1:
                    raise
        raise AssertionError("the last one raises")

    def _adopt(self, run_id: str) -> None:
        for namesake in range(MAX_NAMESAKES):
            found: list[VaultFile] = []
            for rank in range(len(self._vaults)):
                with contextlib.suppress(VaultError):
                    found.append(VaultFile.adopt(self._path(rank, namesake)))
            if len(found) == len(self._vaults) and all(_is_of(vault, run_id) for vault in found):
                self._vaults = list(found)
                newest = self.newest()
                if newest is not None:
                    logger.info(
                        "found the vault of an agent that is gone step=%d generation=%d", newest.step, newest.number
                    )
                    return
            self._vaults = [None] * len(self._vaults)
            for vault in found:
                vault.close()


def _is_of(vault: VaultFile, run_id: str) -> bool:
    return any(generation.run_id == run_id for generation in vault.generations())


def _default_directory() -> Path:
    if SHARED_MEMORY.is_dir():
        return SHARED_MEMORY
    directory = Path(tempfile.gettempdir())
    logger.warning("no /dev/shm: snapshots go to files in %s; name shared memory with --vault-dir", directory)
    return directory


def _remove_forgotten(directory: Path) -> None:
    """Those of agents that are gone, after a day."""
    for path in directory.glob(f"wadiloco-*{SUFFIX}"):
        with contextlib.suppress(OSError, VaultError):
            if time.time() - path.stat().st_mtime < FORGOTTEN_S:
                continue
            vault = VaultFile.adopt(path)
            # What is written through a map does not always change the file's time.
            taken_s = max((generation.taken_s for generation in vault.generations()), default=0.0)
            vault.close(remove=time.time() - taken_s > FORGOTTEN_S)
