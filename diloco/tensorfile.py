"""Safetensors files whose data is written as it comes: the header first, then raw fp32 bytes in a known order.

A file is 8 bytes of header length, the header (JSON: for each tensor its type, shape and place; text metadata), the
data. Writing it ourselves lets an upload stream into its final form, and needs no second copy of the parameters.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod

from diloco.schema import Manifest, TensorSpec

MANIFEST_KEY = "manifest"
FP32_BYTES = 4
LENGTH = struct.Struct("<Q")
ALIGNMENT = 8
"""Data starts at a multiple of this, so that a memory map of it can be read as fp32."""


def header_bytes(tensors: Iterable[tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Everything before the data of a file that holds these fp32 tensors, one after another."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in tensors:
        end = offset + FP32_BYTES * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def layout(specs: Iterable[TensorSpec], *, prefix: str = "") -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a manifest, in wire order."""
    return [(prefix + spec.name, spec.shape) for spec in specs]


def offer_header(manifest: Manifest) -> bytes:
    """What precedes the flat parameters in an offer (``PUT /v1/fragments/{f}``)."""
    return header_bytes(layout(manifest.tensors), {MANIFEST_KEY: manifest.model_dump_json()})
