"""One generation on its way into a replica: regions that are filled chunk by chunk, and digested as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import xxhash

from diloco.vault.file import VaultFile
from diloco.vault.layout import Generation
from service.errors import InputError


@dataclass(slots=True)
class Incoming:
    """A generation that is being received."""

    generation: Generation
    """With the regions of this vault."""
    received: list[int]
    digests: list[Any] = field(default_factory=list)
    """Of what was received of each part."""
    is_complete: bool = False


@dataclass(slots=True)
class Kept:
    """The replicas of one rank of a slot."""

    vault: VaultFile
    epoch: int
    """The highest of those who sent them: lower ones have lost the slot."""
    epochs: dict[int, int] = field(default_factory=dict)
    """Of each generation."""
    incoming: Incoming | None = None


class PartSink:
    """One chunk on its way into its region. It counts once its digest has been found right (`finish`)."""

    def __init__(self, kept: Kept, incoming: Incoming, part: int) -> None:
        self._incoming = incoming
        self._index = part
        self._part = incoming.generation.parts[part]
        self._region = kept.vault.region(self._part.region)
        self._whole = incoming.digests[part].copy()
        self._chunk = xxhash.xxh3_128()
        self._at = incoming.received[part]

    @property
    def part_bytes(self) -> int:
        return self._part.length

    @property
    def expected_start(self) -> int:
        return self._incoming.received[self._index]

    def write(self, data: bytes) -> None:
        """Raises `InputError`: it is more than the part has."""
        if self._at + len(data) > self._part.length:
            raise InputError(f"is longer than the part's {self._part.length} bytes", field="body")
        self._region[self._at : self._at + len(data)] = data
        self._at += len(data)
        self._chunk.update(data)
        self._whole.update(data)

    def finish(self, digest: str) -> None:
        """Raises `InputError`: other bytes than were sent have arrived."""
        if self._chunk.hexdigest() != digest:
            raise InputError("does not match the bytes that arrived", field="chunk digest", remedy="send it again")
        self._incoming.received[self._index] = self._at
        self._incoming.digests[self._index] = self._whole
