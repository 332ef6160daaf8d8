"""Offers of initial parameters: a safetensors file whose metadata holds the manifest."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from diloco.errors import ManifestError
from diloco.fragment import first_difference, num_bytes, wire_bytes
from diloco.schema import Manifest
from diloco.synchronizer.storage import read_part
from diloco.synchronizer.upload import Chunk, Name, Upload, part_path, require_finite, require_near
from diloco.tensorfile import FP32_BYTES, parse_offer
from service.app import DEFAULT_MAX_BODY_BYTES
from service.errors import InputError

MAX_HEADER_BYTES = DEFAULT_MAX_BODY_BYTES
"""The header of an offer comes whole in its first chunk."""


def check_offer(chunk: Chunk, *, current: Manifest | None, max_bytes: int) -> None:
    """Refuse an offer at its first chunk if its end could only be refused.

    Raises:
        ManifestError: the run that there is has another model.
    """
    manifest, data_offset = parse_offer(chunk.data)
    size = num_bytes(manifest)
    if chunk.total != data_offset + size:
        raise InputError(f"offer has {chunk.total} bytes, its manifest needs {data_offset + size}", field="manifest")
    if size > max_bytes:
        raise InputError(
            f"the parameters have {size} bytes, the limit is {max_bytes}",
            field="max_contribution_bytes",
            remedy="raise --max-contribution-bytes of the synchronizer",
        )
    difference = first_difference(current, manifest) if current else None
    if difference is not None:
        raise ManifestError(
            f"the model differs from that of the run: {difference}",
            field="manifest",
            remedy=ManifestError.REMEDY,
        )


def begin_offer(directory: Path, name: Name, chunk: Chunk) -> Upload:
    return Upload(part_path(directory, name), total=chunk.total, digest=chunk.digest)


def read_offer(upload: Upload) -> tuple[Manifest, Tensor]:
    """Check a complete offer and read its parameters."""
    upload.verify()
    manifest, data_offset = parse_offer(read_part(upload.path, offset=0, length=MAX_HEADER_BYTES))
    flat = torch.empty((upload.total - data_offset) // FP32_BYTES)
    with upload.path.open("rb") as file:
        file.seek(data_offset)
        file.readinto(wire_bytes(flat))
    require_finite(flat)
    require_near(flat, torch.zeros(()).expand_as(flat), what="zero")
    return manifest, flat
