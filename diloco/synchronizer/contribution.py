"""Contributions: what one slot gives to one round, as a safetensors file that says whose it is and how it is encoded.

As fp32 the file has the tensor `LOCAL`, local parameters; with every other codec `PSEUDO_GRADIENT`, bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.codec import CODECS, FP32_BYTES, Codec, codec_named
from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.schema import Applied
from diloco.stages import STAGES, Stage
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.storage import SPARE_SUFFIX, retire
from diloco.synchronizer.upload import (
    FINITE_BLOCK,
    MAX_DISTANCE,
    Chunk,
    Name,
    Upload,
    part_path,
    require_finite_block,
    require_near_by,
)
from diloco.tensorfile import header_bytes, sealed, unsealed
from service.errors import InputError

logger = logging.getLogger(__name__)

PREFIX = "contribution-"
LOCAL = "local"
PSEUDO_GRADIENT = "pseudo_gradient"


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

    @property
    def applied(self) -> Applied:
        """What a generation that it is in remembers of it."""
        return Applied(round=self.claim.round, into=self.into, digest=self.digest.hex())

    @property
    def codec(self) -> Codec:
        return CODECS[self.claim.codec]

    def payload(self) -> Tensor:
        """The bytes that arrived, mapped from the file."""
        return _read_payload(self.path, self.codec)


def contribution_path(directory: Path, *, into: int, slot: int) -> Path:
    return directory / f"{PREFIX}{into:012d}-{slot:05d}.safetensors"


def retire_contribution(path: Path) -> None:
    """Its round is over; the slot's next one takes its place on disk."""
    retire(path, _spare(path.parent, int(path.stem.rpartition("-")[2])))


def _spare(directory: Path, slot: int) -> Path:
    return directory / f"slot-{slot}{SPARE_SUFFIX}"


def upload_name(claim: Claim) -> Name:
    return Name(f"slot-{claim.slot}", claim.epoch)


def begin_contribution(directory: Path, claim: Claim, chunk: Chunk) -> Upload:
    metadata = {
        "round": str(claim.round),
        "slot": str(claim.slot),
        "epoch": str(claim.epoch),
        "tokens": str(claim.tokens),
        "codec": claim.codec,
        "run": claim.run or "",
        **{name: _text(getattr(claim, name)) for name in ("quorum", "expected", "closes_in_s")},
        "sha256": chunk.digest.hex(),
    }
    if CODECS[claim.codec].carries_parameters:
        header = header_bytes([(LOCAL, (chunk.total // FP32_BYTES,))], sealed(metadata))
    else:
        header = header_bytes([(PSEUDO_GRADIENT, (chunk.total,))], sealed(metadata), kind="U8")
    return Upload(
        part_path(directory, upload_name(claim)),
        total=chunk.total,
        digest=chunk.digest,
        header=header,
        spare=_spare(directory, claim.slot),
    )


def verify_contribution(upload: Upload, base: Tensor, codec: Codec = CODECS["fp32"]) -> bool:
    """Check and persist a complete contribution to parameters ``base``, still under its temporary name; True if good.

    Raises:
        InputError: it is not what was announced, not finite, or absurdly far from the base.
    """
    upload.verify()
    with STAGES.of(Stage.CHECK):
        payload = _read_payload(upload.path, codec)
        # Scales alone tell it of any contribution that comes from training.
        if not codec.norm_bound(payload, base.numel()) <= MAX_DISTANCE / 2:
            _check_values(payload, base, codec)
    return True


def _check_values(payload: Tensor, base: Tensor, codec: Codec) -> None:
    """One pass over the values: all finite, and not too far away."""
    distances = []
    room = torch.empty(FINITE_BLOCK)
    for number, origin in enumerate(torch.split(base, FINITE_BLOCK)):
        start = number * FINITE_BLOCK
        block = codec.decode_part(payload, base.numel(), start, room[: origin.numel()])
        require_finite_block(block, start=start)
        # A pseudo-gradient is the way to the global parameters itself.
        way = block - origin if codec.carries_parameters else block
        distances.append(float(torch.linalg.vector_norm(way)))
    require_near_by(math.hypot(*distances), what="the global parameters")


def accept_contribution(directory: Path, claim: Claim, upload: Upload, *, into: int) -> Accepted:
    """Make a verified contribution count in the round ``into``, also after a restart of this process.

    It is not synced: where the machine itself goes down before the round is over, the island contributes again.
    """
    path = contribution_path(directory, into=into, slot=claim.slot)
    with STAGES.of(Stage.STORE):
        upload.path.replace(path)
    return Accepted(claim=claim, digest=upload.digest, path=path, into=into)


def recover_contributions(
    directory: Path, *, round_number: int, num_values: int, bases: Collection[int], run: str | None = None
) -> Iterable[Accepted]:
    """Contributions to the open round that an earlier process accepted; all other contribution files are removed.

    ``bases`` are the versions whose parameters there still are: nothing can be made of one against another, nor of one
    for another ``run``.
    """
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            accepted = _read_contribution(path)
        except (InputError, SafetensorError, KeyError, ValueError, OSError) as exc:
            logger.warning("contribution is damaged, removed path=%s reason=%s", path, exc)
            path.unlink()
            continue
        if accepted.into != round_number or accepted.payload().numel() != accepted.codec.num_bytes(num_values):
            path.unlink()
        elif run is not None and accepted.claim.run not in {None, run}:
            logger.warning("contribution is for another run, removed path=%s", path)
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
    codec = codec_named(metadata.get("codec", "fp32"))
    if sha256(wire_bytes(_read_payload(path, codec))) != digest:
        raise InputError("does not match its digest", field=str(path))
    claim = Claim(
        codec=codec.name,
        run=metadata.get("run") or None,
        **{name: int(metadata[name]) for name in ("round", "slot", "epoch", "tokens")},
        quorum=_number(metadata, "quorum"),
        expected=_number(metadata, "expected"),
        closes_in_s=float(metadata["closes_in_s"]) if metadata.get("closes_in_s") else None,
    )
    into = int(path.name.removeprefix(PREFIX).partition("-")[0])
    return Accepted(claim=claim, digest=digest, path=path, into=into)


def _read_payload(path: Path, codec: Codec) -> Tensor:
    """The bytes that arrived, mapped from the file."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(LOCAL if codec.carries_parameters else PSEUDO_GRADIENT)
    if tensor.dtype != (torch.float32 if codec.carries_parameters else torch.uint8):
        raise InputError(f"holds {tensor.dtype}", field=str(path))
    return tensor.view(torch.uint8)


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)


def _number(metadata: Mapping[str, str], name: str) -> int | None:
    """None where nothing was said, as in files from before it could be."""
    return int(metadata[name]) if metadata.get(name) else None
