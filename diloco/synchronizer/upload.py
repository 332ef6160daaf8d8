"""Uploads in progress: files that grow chunk by chunk.

A chunk that could not be written does not count as received and may be sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.digest import Hash
from diloco.stages import STAGES, Stage
from diloco.synchronizer.storage import PART_SUFFIX
from service.errors import InputError
from service.files import open_regular

FINITE_BLOCK = 1 << 18
"""Elements checked at once: what one operation writes is in the cache for the next."""


MAX_DISTANCE = 1e18
"""Largest L2 distance of parameters from the global ones. Its square, and 300 times that, is finite in fp32: so are the
pseudo-gradient (a mean cannot be longer than the longest), its norm here and on the islands, and 1e20 steps of it."""
OWNER_LIMIT = 2
"""Uploads in progress of one owner: the epoch that is going and the one that may take over."""


class Name(NamedTuple):
    """What an upload is called: who sends it, and under which epoch.

    Epochs have uploads of their own: one that is not complete may come from anybody, and must not cost the owner his.
    """

    owner: str
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an upload whose own digest has been verified."""

    start: int
    total: int
    digest: bytes
    """sha-256 of the whole."""
    data: bytes
    hashed: Hash | None = None
    """What its bytes have been put into already, and nothing else."""


class Upload:
    """A transfer: the first `received` of its `total` bytes are in the file, behind ``header``."""

    def __init__(
        self, path: Path, *, total: int, digest: bytes, header: bytes = b"", spare: Path | None = None
    ) -> None:
        """``spare`` becomes the file, where there is one (`storage.retire`); what it holds beyond is cut off."""
        self.path = path
        self.total = total
        self.digest = digest
        self.received = 0
        self._data_offset = len(header)
        self._hash: Hash = hashlib.sha256()
        if spare is not None:
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                spare.replace(path)
        self._is_spare = spare is not None
        truncate = 0 if self._is_spare else os.O_TRUNC
        with os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | truncate), "r+b") as file:
            file.write(header)

    @property
    def is_complete(self) -> bool:
        return self.received == self.total

    def append(self, chunk: Chunk) -> None:
        """Take the chunk if it is the next one; one that was received before, or that leaves a gap, changes nothing."""
        if chunk.start != self.received:
            return
        with STAGES.of(Stage.STORE), self.path.open("r+b") as file:
            file.seek(self._data_offset + chunk.start)
            file.write(chunk.data)
        if chunk.start == 0 and chunk.hashed is not None:
            self._hash = chunk.hashed
        else:
            with STAGES.of(Stage.DIGEST):
                self._hash.update(chunk.data)
        self.received += len(chunk.data)

    def verify(self) -> None:
        """Check the whole against its digest.

        Raises:
            InputError: the bytes are not those that were announced.
        """
        if self._hash.digest() != self.digest:
            raise InputError(
                "does not match the bytes that arrived", field="Repr-Digest", remedy="send the whole again"
            )
        if self._is_spare:
            with STAGES.of(Stage.STORE):
                os.truncate(self.path, self._data_offset + self.total)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


class Uploads:
    """The uploads in progress, one per name; beyond a limit a new one takes the place of the one idle for longest."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[Name, tuple[Hashable, Upload]] = {}

    def find(self, name: Name, key: Hashable) -> Upload | None:
        """The upload of that name if it is still about the same thing."""
        entry = self._by_name.pop(name, None)
        if entry is None:
            return None
        self._by_name[name] = entry  # to the end: most recently used
        return entry[1] if entry[0] == key else None

    def put(self, name: Name, key: Hashable, upload: Upload) -> None:
        self._by_name.pop(name, None)
        self._by_name[name] = (key, upload)
        for idle in self._of(name.owner)[:-OWNER_LIMIT]:
            self.discard(idle)
        while len(self._by_name) > self._limit:
            self.discard(next(iter(self._by_name)))

    def discard(self, name: Name) -> None:
        """Forget an upload and remove its file."""
        entry = self._by_name.pop(name, None)
        if entry is not None:
            entry[1].discard()

    def settle(self, name: Name) -> None:
        """Forget an upload whose file has become something else, and discard those of the owner's older epochs."""
        self._by_name.pop(name, None)
        for other in self._of(name.owner):
            if other.epoch < name.epoch:
                self.discard(other)

    def discard_unless(self, keep: Callable[[Hashable], bool]) -> None:
        for name, (key, _) in list(self._by_name.items()):
            if not keep(key):
                self.discard(name)

    def _of(self, owner: str) -> list[Name]:
        return [name for name in self._by_name if name.owner == owner]


def part_path(directory: Path, name: Name) -> Path:
    return directory / f"upload-{name.owner}-{name.epoch}{PART_SUFFIX}"


def require_finite(flat: Tensor) -> None:
    for number, block in enumerate(torch.split(flat, FINITE_BLOCK)):
        require_finite_block(block, start=number * FINITE_BLOCK)


def require_finite_block(block: Tensor, *, start: int) -> None:
    """As `require_finite`, of a part that begins at the element ``start``."""
    low, high = torch.aminmax(block)  # both NaN where one value is; twelve times faster than asking each of them
    if not (math.isfinite(low) and math.isfinite(high)):
        index = start + int(torch.argmin(torch.isfinite(block).to(torch.uint8)))
        raise InputError(f"element {index} is NaN or infinite", field="body", remedy="skip this round")


def require_near(flat: Tensor, base: Tensor, *, what: str) -> None:
    """Refuse a vector farther than `MAX_DISTANCE` from ``base``, which the error calls ``what``.

    Raises:
        InputError: it is, or the distance overflows.
    """
    require_near_by(distance_between(flat, base), what=what)


def require_near_by(distance: float, *, what: str) -> None:
    """As `require_near`, of a distance that is known."""
    if not distance <= MAX_DISTANCE:
        raise InputError(
            f"is {distance:.3g} away from {what}, at most {MAX_DISTANCE:g} is accepted",
            field="body",
            remedy="look for what made the training diverge",
        )


def distance_between(a: Tensor, b: Tensor) -> float:
    """L2 norm of the difference, in fp32 within a block; infinity or NaN when it overflows."""
    blocks = zip(torch.split(a, FINITE_BLOCK), torch.split(b, FINITE_BLOCK), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm(left - right)) for left, right in blocks))
