"""Contributions: local parameters of one slot for one round, as a safetensors file that says whose they are."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.storage import publish
from diloco.synchronizer.upload import Chunk, Name, Upload, part_path, require_finite, require_near
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
    into: int
    """Round that it was taken into: the one that it is against, or a later one."""

    @property
    def staleness(self) -> int:
        """Versions that had come between the one that it is against and the one that it was taken in at."""
        return self.into - self.claim.round

    def local(self) -> Tensor:
        """The local parameters, mapped from the file."""
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(TENSOR)
            return tensor


def contribution_path(directory: Path, *, into: int, slot: int) -> Path:
    return directory / f"{PREFIX}{into:012d}-{slot:05d}.safetensors"


def upload_name(claim: Claim) -> Name:
    return Name(f"slot-{claim.slot}", claim.epoch)


def begin_contribution(directory: Path, claim: Claim, chunk: Chunk) -> Upload:
    metadata = {
        "round": str(claim.round),
        "slot": str(claim.slot),
        "epoch": str(claim.epoch),
        "tokens": str(claim.tokens),
        **{name: _text(getattr(claim, name)) for name in ("quorum", "expected", "closes_in_s")},
        "sha256": chunk.digest.hex(),
    }
    header = header_bytes([(TENSOR, (chunk.total // FP32_BYTES,))], sealed(metadata))
    return Upload(part_path(directory, upload_name(claim)), total=chunk.total, digest=chunk.digest, header=header)


def verify_contribution(upload: Upload, base: Tensor) -> bool:
    """Check and persist a complete contribution to parameters ``base``, still under its temporary name; True if good.

    Raises:
        InputError: it is not what was announced, not finite, or absurdly far from the base.
    """
    upload.verify()
    with safe_open(upload.path, framework="pt") as file:
        local = file.get_tensor(TENSOR)
        require_finite(local)
        require_near(local, base, what="the global parameters")
    return True


def accept_contribution(directory: Path, claim: Claim, upload: Upload, *, into: int) -> Accepted:
    """Make a verified contribution count in the round ``into``, also after a crash."""
    path = contribution_path(directory, into=into, slot=claim.slot)
    publish(upload.path, path)
    return Accepted(claim=claim, digest=upload.digest, path=path, into=into)


def recover_contributions(
    directory: Path, *, round_number: int, num_bytes: int, bases: Collection[int]
) -> Iterable[Accepted]:
    """Contributions to the open round that an earlier process accepted; all other contribution files are removed.

    ``bases`` are the versions whose parameters there still are: nothing can be made of one against another.
    """
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            accepted = _read_contribution(path)
        except (InputError, SafetensorError, KeyError, ValueError, OSError) as exc:
            logger.warning("contribution is damaged, removed path=%s reason=%s", path, exc)
            path.unlink()
            continue
        if accepted.into != round_number or accepted.local().numel() * FP32_BYTES != num_bytes:
            path.unlink()
        elif accepted.claim.round not in bases:
            logger.error("contribution is against a generation that is lost, removed path=%s", path)
            path.unlink()
        else:
            yield accepted


def _read_contribution(path: Path) -> Accepted:
    with safe_open(path, framework="pt") as file:
        metadata = unsealed(file.metadata() or {})
        digest = bytes.fromhex(metadata["sha256"])
        local = file.get_tensor(TENSOR)
        if local.dtype != torch.float32 or sha256(wire_bytes(local)) != digest:
            raise InputError("does not match its digest", field=str(path))
    claim = Claim(
        **{name: int(metadata[name]) for name in ("round", "slot", "epoch", "tokens")},
        quorum=_number(metadata, "quorum"),
        expected=_number(metadata, "expected"),
        closes_in_s=float(metadata["closes_in_s"]) if metadata.get("closes_in_s") else None,
    )
    into = int(path.name.removeprefix(PREFIX).partition("-")[0])
    return Accepted(claim=claim, digest=digest, path=path, into=into)


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)


def _number(metadata: Mapping[str, str], name: str) -> int | None:
    """None where nothing was said, as in files from before it could be."""
    return int(metadata[name]) if metadata.get(name) else None
