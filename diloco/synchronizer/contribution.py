"""Contributions: local parameters of one slot for one round, as a safetensors file that says whose they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.storage import publish
from diloco.synchronizer.upload import Chunk, Upload, part_path, require_finite
from diloco.tensorfile import FP32_BYTES, header_bytes, sealed, unsealed
from service.errors import InputError

logger = logging.getLogger(__name__)

PREFIX = "contribution-"
TENSOR = "local"


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


def contribution_path(directory: Path, claim: Claim) -> Path:
    return directory / f"{PREFIX}{claim.round:012d}-{claim.slot:05d}.safetensors"


def begin_contribution(directory: Path, claim: Claim, chunk: Chunk) -> Upload:
    metadata = {
        "round": str(claim.round),
        "slot": str(claim.slot),
        "epoch": str(claim.epoch),
        "tokens": str(claim.tokens),
        "quorum": "" if claim.quorum is None else str(claim.quorum),
        "sha256": chunk.digest.hex(),
    }
    header = header_bytes([(TENSOR, (chunk.total // FP32_BYTES,))], sealed(metadata))
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


def recover_contributions(directory: Path, *, round_number: int, num_bytes: int) -> Iterable[Accepted]:
    """Contributions to the open round that an earlier process accepted; all other contribution files are removed."""
    for path in sorted(directory.glob(f"{PREFIX}*")):
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
        metadata = unsealed(file.metadata() or {})
        digest = bytes.fromhex(metadata["sha256"])
        local = file.get_tensor(TENSOR)
        if local.dtype != torch.float32 or sha256(wire_bytes(local)) != digest:
            raise InputError("does not match its digest", field=str(path))
    claim = Claim(
        **{name: int(metadata[name]) for name in ("round", "slot", "epoch", "tokens")},
        quorum=int(metadata["quorum"]) if metadata["quorum"] else None,
    )
    return Accepted(claim=claim, digest=digest, path=path)
