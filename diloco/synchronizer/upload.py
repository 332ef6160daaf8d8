"""An upload in progress, and what it becomes: a verified contribution, or verified initial parameters.

An upload is one file that grows chunk by chunk. A chunk that could not be written does not count as received and may be
sent again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.schema import Manifest
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.storage import PART_SUFFIX, publish, read_part
from diloco.tensorfile import FP32_BYTES, header_bytes, parse_offer
from service.app import DEFAULT_MAX_BODY_BYTES
from service.errors import InputError

logger = logging.getLogger(__name__)

CONTRIBUTION_PREFIX = "contribution-"
TENSOR = "local"
FINITE_BLOCK = 1 << 20
"""Elements checked at once: the check's temporary memory stays at 1 MiB, whatever the model."""


MAX_OFFER_HEADER_BYTES = DEFAULT_MAX_BODY_BYTES
"""The header of an offer comes whole in its first chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an upload whose own digest has been verified."""

    start: int
    total: int
    digest: bytes
    """sha-256 of the whole."""
    data: bytes


class Upload:
    """A transfer: the first `received` of its `total` bytes are in the file, behind ``header``."""

    def __init__(self, path: Path, *, total: int, digest: bytes, header: bytes = b"") -> None:
        self.path = path
        self.total = total
        self.digest = digest
        self.received = 0
        self._data_offset = len(header)
        self._hash = hashlib.sha256()
        path.write_bytes(header)

    @property
    def is_complete(self) -> bool:
        return self.received == self.total

    def append(self, chunk: Chunk) -> None:
        """Take the chunk if it is the next one; one that was received before, or that leaves a gap, changes nothing."""
        if chunk.start != self.received:
            return
        with self.path.open("r+b") as file:
            file.seek(self._data_offset + chunk.start)
            file.write(chunk.data)
        self._hash.update(chunk.data)
        self.received += len(chunk.data)

    def verify(self) -> None:
        """Check the whole against its digest and put it on disk.

        Raises:
            InputError: the bytes are not those that were announced.
        """
        if self._hash.digest() != self.digest:
            raise InputError(
                "does not match the bytes that arrived", field="Repr-Digest", remedy="send the whole again"
            )
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


class Uploads:
    """The uploads in progress, one per name; beyond the limit a new one takes the place of the one idle for longest."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, tuple[Hashable, Upload]] = {}

    def find(self, name: str, key: Hashable) -> Upload | None:
        """The upload of that name if it is still about the same thing."""
        entry = self._by_name.pop(name, None)
        if entry is None:
            return None
        self._by_name[name] = entry  # to the end: most recently used
        return entry[1] if entry[0] == key else None

    def put(self, name: str, key: Hashable, upload: Upload) -> None:
        self._by_name.pop(name, None)
        self._by_name[name] = (key, upload)
        while len(self._by_name) > self._limit:
            self.discard(next(iter(self._by_name)))

    def discard(self, name: str) -> None:
        """Forget an upload and remove its file."""
        entry = self._by_name.pop(name, None)
        if entry is not None:
            entry[1].discard()

    def forget(self, name: str) -> None:
        """Forget an upload whose file has become something else."""
        self._by_name.pop(name, None)

    def discard_all(self) -> None:
        for name in list(self._by_name):
            self.discard(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A contribution that is verified and on disk."""

    claim: Claim
    digest: bytes
    path: Path

    def local(self) -> Tensor:
        """The local parameters, mapped from the file."""
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(TENSOR)
            return tensor


def part_path(directory: Path, name: str) -> Path:
    return directory / f"upload-{name}{PART_SUFFIX}"


def contribution_path(directory: Path, claim: Claim) -> Path:
    return directory / f"{CONTRIBUTION_PREFIX}{claim.round:012d}-{claim.slot:05d}.safetensors"


def begin_contribution(directory: Path, claim: Claim, chunk: Chunk) -> Upload:
    metadata = {
        "round": str(claim.round),
        "slot": str(claim.slot),
        "epoch": str(claim.epoch),
        "tokens": str(claim.tokens),
        "sha256": chunk.digest.hex(),
    }
    header = header_bytes([(TENSOR, (chunk.total // FP32_BYTES,))], metadata)
    return Upload(part_path(directory, f"slot-{claim.slot}"), total=chunk.total, digest=chunk.digest, header=header)


def verify_contribution(upload: Upload) -> bool:
    """Check and persist a complete contribution, still under its temporary name; True when it is good."""
    upload.verify()
    with safe_open(upload.path, framework="pt") as file:
        require_finite(file.get_tensor(TENSOR))
    return True


def accept_contribution(directory: Path, claim: Claim, upload: Upload) -> Accepted:
    """Make a verified contribution count, also after a crash."""
    path = contribution_path(directory, claim)
    publish(upload.path, path)
    return Accepted(claim=claim, digest=upload.digest, path=path)


def begin_offer(directory: Path, name: str, chunk: Chunk) -> Upload:
    return Upload(part_path(directory, name), total=chunk.total, digest=chunk.digest)


def read_offer(upload: Upload) -> tuple[Manifest, Tensor]:
    """Check a complete offer and read its parameters."""
    upload.verify()
    manifest, data_offset = parse_offer(read_part(upload.path, offset=0, length=MAX_OFFER_HEADER_BYTES))
    flat = torch.empty((upload.total - data_offset) // FP32_BYTES)
    with upload.path.open("rb") as file:
        file.seek(data_offset)
        file.readinto(wire_bytes(flat))
    require_finite(flat)
    return manifest, flat


def require_finite(flat: Tensor) -> None:
    for number, block in enumerate(torch.split(flat, FINITE_BLOCK)):
        finite = torch.isfinite(block)
        if not finite.all():
            index = number * FINITE_BLOCK + int(torch.argmin(finite.to(torch.uint8)))
            raise InputError(f"element {index} is NaN or infinite", field="body", remedy="skip this round")


def recover_contributions(directory: Path, *, round_number: int, num_bytes: int) -> Iterable[Accepted]:
    """Contributions to the open round that an earlier process accepted; all other contribution files are removed."""
    for path in sorted(directory.glob(f"{CONTRIBUTION_PREFIX}*")):
        try:
            accepted = _read_contribution(path)
        except (InputError, SafetensorError, KeyError, ValueError, OSError) as exc:
            logger.warning("contribution is damaged, removed path=%s reason=%s", path, exc)
            path.unlink()
            continue
        if accepted.claim.round == round_number and accepted.local().numel() * FP32_BYTES == num_bytes:
            yield accepted
        else:
            path.unlink()


def _read_contribution(path: Path) -> Accepted:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        digest = bytes.fromhex(metadata["sha256"])
        if sha256(wire_bytes(file.get_tensor(TENSOR))) != digest:
            raise InputError("does not match its digest", field=str(path))
    claim = Claim(**{name: int(metadata[name]) for name in ("round", "slot", "epoch", "tokens")})
    return Accepted(claim=claim, digest=digest, path=path)
