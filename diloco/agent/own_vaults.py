"""The vaults of the own ranks as the agent reads them: mapped once, and anew when another file takes a place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.vault.errors import CorruptError, VaultError
from diloco.vault.file import VaultFile
from diloco.vault.layout import Generation, digest_of

COPY_BYTES = 1 << 20


class StaleGenerationError(VaultError):
    """It has been overwritten: a newer one is there, or will be."""


@dataclass(slots=True)
class _Mapped:
    vault: VaultFile
    inode: int


class OwnVaults:
    """Vaults by path; for one event loop, but for `copy_parts`."""

    def __init__(self) -> None:
        self._mapped: dict[Path, _Mapped] = {}

    def get(self, path: Path) -> VaultFile | None:
        """The vault as it is there now; None where there is none (yet)."""
        found = self._mapped.get(path)
        try:
            inode = path.stat().st_ino
        except OSError:
            inode = -1
        if found is not None and found.inode == inode:
            return found.vault
        if found is not None:
            self._mapped.pop(path).vault.close()
        if inode < 0:
            return None
        with contextlib.suppress(VaultError):
            self._mapped[path] = _Mapped(VaultFile.open(path), inode)
            return self._mapped[path].vault
        return None

    def newest(self, paths: Sequence[Path]) -> dict[Path, Generation] | None:
        """The newest generation that all of these have committed, with its record of each; None where there is none."""
        found: list[dict[int, Generation]] = []
        for path in paths:
            vault = self.get(path)
            if vault is None:
                return None
            found.append({generation.number: generation for generation in vault.generations()})
        common = set.intersection(*(set(each) for each in found)) if found else set()
        if not common:
            return None
        number = max(common)
        return {path: each[number] for path, each in zip(paths, found, strict=True)}

    def newest_number(self, paths: Sequence[Path]) -> int:
        """At least that of what `newest` would find, for two reads per vault; 0 where a vault is missing."""
        vaults = [self.get(path) for path in paths]
        return min((0 if vault is None else vault.newest_number() for vault in vaults), default=0)

    def close(self) -> None:
        for mapped in self._mapped.values():
            mapped.vault.close()
        self._mapped.clear()


def copy_parts(
    vault: VaultFile, generation: Generation, wanted: Sequence[int], buffer: bytearray
) -> dict[int, memoryview]:
    """Copies of parts, checked: the worker may overwrite them meanwhile. May run on any thread.

    Raises:
        StaleGenerationError: it has.
        CorruptError: they are not what was committed.
    """
    copied: dict[int, memoryview] = {}
    target, at = memoryview(buffer), 0
    for index in wanted:
        part = generation.parts[index]
        with vault.view(part) as view:
            for start in range(0, part.length, COPY_BYTES):
                stop = min(start + COPY_BYTES, part.length)
                target[at + start : at + stop] = view[start:stop]
        copied[index] = target[at : at + part.length]
        at += part.length
    bad = [generation.parts[i].name for i, data in copied.items() if digest_of(data) != generation.parts[i].digest]
    if not vault.holds(generation):
        raise StaleGenerationError(f"generation {generation.number} was overwritten meanwhile", field="vault")
    if bad:
        raise CorruptError(f"{bad[0]} of generation {generation.number} is not as its digest says", field="vault")
    return copied
