"""Offers of initial parameters: a safetensors file whose metadata holds the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.errors import ManifestError
from diloco.fragment import first_difference, num_bytes, wire_bytes
from diloco.partition import check_fragments, cut, joined
from diloco.schema import Manifest
from diloco.sharding import SynchronizerShard
from diloco.synchronizer.storage import read_part
from diloco.synchronizer.upload import Chunk, Name, Upload, part_path, require_finite, require_near
from diloco.tensorfile import FP32_BYTES, Offer, owned_by, parse_offer
from service.app import DEFAULT_MAX_BODY_BYTES
from service.errors import InputError

MAX_HEADER_BYTES = DEFAULT_MAX_BODY_BYTES
"""The header of an offer comes whole in its first chunk."""


def check_offer(
    chunk: Chunk, *, current: Sequence[Manifest], max_bytes: int, shard: SynchronizerShard | None = None
) -> None:
    """Refuse an offer at its first chunk if its end could only be refused.

    ``current`` are the manifests of the fragments of the run that there is, if there is one: of all of them, also of
    those that do not live on this ``shard``.

    Raises:
        ManifestError: that run has another model, or other fragments.
        InputError: the model has fewer tensors than the offer wants fragments, or it is for another shard.
    """
    offer = parse_offer(chunk.data)
    _check_shard(offer, shard)
    manifest, data_offset, num_fragments = offer.manifest, offer.data_offset, offer.num_fragments
    size = num_bytes(offer.offered)
    if chunk.total != data_offset + size:
        raise InputError(f"offer has {chunk.total} bytes, its manifest needs {data_offset + size}", field="manifest")
    if size > max_bytes:
        raise InputError(
            f"the parameters have {size} bytes, the limit is {max_bytes}",
            field="max_contribution_bytes",
            remedy="raise --max-contribution-bytes of the synchronizer",
        )
    if not current:
        cut(manifest, num_fragments)
    elif (difference := first_difference(joined(current), manifest)) is not None:
        raise ManifestError(
            f"the model differs from that of the run: {difference}",
            field="manifest",
            remedy=ManifestError.REMEDY,
        )
    else:
        check_fragments(cut(manifest, num_fragments), [len(fragment.tensors) for fragment in current])


def _check_shard(offer: Offer, shard: SynchronizerShard | None) -> None:
    wanted = None if offer.part is None else offer.part.shard
    if wanted != shard:
        offered = "the whole run" if wanted is None else f"shard {wanted}"
        here = "has the whole run" if shard is None else f"is shard {shard}"
        raise InputError(
            f"the offer is for {offered}, this synchronizer {here}",
            field="shard",
            remedy="give islands the URLs of all synchronizers, in the order of their --shard",
        )


def begin_offer(directory: Path, name: Name, chunk: Chunk) -> Upload:
    return Upload(part_path(directory, name), total=chunk.total, digest=chunk.digest)


class Offered(NamedTuple):
    """A complete offer."""

    manifests: tuple[Manifest, ...]
    """Of the fragments that it holds."""
    parameters: Tensor  # (parameters of these fragments,) fp32
    offer: Offer


def read_offer(upload: Upload) -> Offered:
    """Check a complete offer and read it."""
    upload.verify()
    offer = parse_offer(read_part(upload.path, offset=0, length=MAX_HEADER_BYTES))
    flat = torch.empty((upload.total - offer.data_offset) // FP32_BYTES)
    with upload.path.open("rb") as file:
        file.seek(offer.data_offset)
        file.readinto(wire_bytes(flat))
    require_finite(flat)
    require_near(flat, torch.zeros(()).expand_as(flat), what="zero")
    shard = None if offer.part is None else offer.part.shard
    return Offered(owned_by(shard, cut(offer.manifest, offer.num_fragments)), flat, offer)
