"""Safetensors files whose data is written as it comes: the header first, then raw bytes in a known order.

A file is 8 bytes of header length, the header (JSON: for each tensor its type, shape and place; text metadata), the
data. Writing it ourselves lets an upload stream into its final form, and needs no second copy of the parameters.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from diloco.schema import MAX_FRAGMENTS, Manifest, TensorSpec
from service.errors import InputError

MANIFEST_KEY = "manifest"
FRAGMENTS_KEY = "num_fragments"
SEAL_KEY = "metadata_sha256"
METADATA_KEY = "__metadata__"
FP32_BYTES = 4
LENGTH = struct.Struct("<Q")
MAX_NAME_LENGTH = 1024
MAX_DIMENSIONS = 16
MAX_SIZE = 1 << 40
"""Of one dimension: beyond any model, and far below the numbers that Python itself will not write out."""
DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Types of trainable parameters."""
ALIGNMENT = 8
"""Data starts at a multiple of this, so that a memory map of it can be read as fp32."""

Layout = Iterable[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors in the order of their data."""
Kind = Literal["F32", "U8"]
"""What tensors are made of: numbers, or bytes that something encoded."""
KIND_BYTES: Mapping[Kind, int] = {"F32": FP32_BYTES, "U8": 1}


def header_bytes(tensors: Layout, metadata: Mapping[str, str], *, kind: Kind = "F32", encoded: Layout = ()) -> bytes:
    """Everything before the data of a file that holds these tensors, one after another, and then the encoded ones."""
    return _header_bytes(metadata, entries(tensors, kind=kind, encoded=encoded))


def _header_bytes(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> bytes:
    text = json.dumps({METADATA_KEY: dict(metadata), **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def sealed(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with a digest of itself, for files on which a run depends: safetensors itself has no checksum."""
    return {**metadata, SEAL_KEY: _seal(metadata)}


def unsealed(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata that was sealed.

    Raises:
        InputError: it is not as it was.
    """
    bare = {key: value for key, value in metadata.items() if key != SEAL_KEY}
    if metadata.get(SEAL_KEY) != _seal(bare):
        raise InputError("does not match its digest", field="metadata")
    return bare


def layout(specs: Iterable[TensorSpec], *, prefix: str = "") -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a manifest, in wire order."""
    return [(prefix + spec.name, spec.shape) for spec in specs]


def offer_header(manifest: Manifest, *, num_fragments: int = 1) -> bytes:
    """What precedes the flat parameters of the whole model in an offer (``PUT /v1/fragments/0``)."""
    fragments = {FRAGMENTS_KEY: str(num_fragments)} if num_fragments > 1 else {}
    return header_bytes(layout(manifest.tensors), {MANIFEST_KEY: manifest.model_dump_json(), **fragments})


class Header(NamedTuple):
    """A header that was read."""

    data_offset: int
    metadata: dict[str, str]
    tensors: dict[str, Any]


def parse_header(data: bytes) -> Header:
    """The header at the beginning of a file, of which ``data`` holds at least that.

    Raises:
        InputError: the bytes are not a safetensors header, or it is longer than the data.
    """
    if len(data) < LENGTH.size:
        raise InputError("too short for a safetensors file", field="body")
    end = LENGTH.size + LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise InputError(f"header does not fit into the first {len(data)} bytes", field="body")
    try:
        header = json.loads(data[LENGTH.size : end])
        metadata = header.pop(METADATA_KEY)
        texts = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, KeyError, AttributeError, RecursionError) as exc:
        raise InputError("is not a safetensors file with metadata", field="body") from exc
    return Header(end, texts, header)


def reheaded(header: Header, metadata: Mapping[str, str]) -> bytes:
    """A header like that, of the same tensors, with other metadata."""
    return _header_bytes(metadata, header.tensors)


class Offer(NamedTuple):
    """What the header of an offer says."""

    manifest: Manifest
    data_offset: int
    num_fragments: int


def parse_offer(data: bytes) -> Offer:
    """What an offer says that begins with ``data``.

    Raises:
        InputError: no manifest, one of no model, or tensors that are not those of the manifest in wire order.
    """
    header = parse_header(data)
    try:
        manifest = Manifest.model_validate_json(header.metadata.get(MANIFEST_KEY, ""))
    except ValidationError as exc:
        raise InputError(f"metadata holds no manifest: {exc.errors()[0]['msg']}", field="manifest") from exc
    check_manifest(manifest)
    if header.tensors != entries(layout(manifest.tensors)):
        raise InputError("tensors are not those of the manifest in wire order, as fp32", field="manifest")
    return Offer(manifest, header.data_offset, _parse_fragments(header.metadata.get(FRAGMENTS_KEY, "1")))


def _parse_fragments(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_FRAGMENTS):
        raise InputError(f"{text[:20]!r} is no number from 1 to {MAX_FRAGMENTS}", field=FRAGMENTS_KEY)
    return int(text)


def check_manifest(manifest: Manifest) -> None:
    """Refuse what can be no model: the first offer starts the run, and every other model is refused from then on.

    Raises:
        InputError: a name, a shape or a type cannot be, or there is not one element.
    """
    seen: set[str] = set()
    for index, spec in enumerate(manifest.tensors):
        where = f"manifest.tensors.{index}"
        if not 1 <= len(spec.name) <= MAX_NAME_LENGTH or spec.name == METADATA_KEY:
            raise InputError(f"is not a name of 1 to {MAX_NAME_LENGTH} characters", field=f"{where}.name")
        if spec.name in seen:
            raise InputError(f"{spec.name} occurs twice", field=f"{where}.name")
        if len(spec.shape) > MAX_DIMENSIONS or any(not 0 <= size <= MAX_SIZE for size in spec.shape):
            raise InputError("is not a shape", field=f"{where}.shape")
        if spec.dtype not in DTYPES:
            raise InputError(f"is none of {', '.join(sorted(DTYPES))}", field=f"{where}.dtype")
        seen.add(spec.name)
    if not any(all(spec.shape) for spec in manifest.tensors):
        raise InputError("no tensor has an element", field="manifest.tensors", remedy="offer a model with parameters")


def entries(tensors: Layout, *, kind: Kind = "F32", encoded: Layout = ()) -> dict[str, Any]:
    """What the header says of these tensors, and of bytes behind them."""
    found: dict[str, Any] = {}
    offset = 0
    for each, (name, shape) in [*((kind, tensor) for tensor in tensors), *(("U8", tensor) for tensor in encoded)]:
        end = offset + KIND_BYTES[each] * prod(shape)
        found[name] = {"dtype": each, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return found


def _seal(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode()).hexdigest()
