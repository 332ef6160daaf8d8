"""Tensors as one part of a vault: a safetensors file in a region, written and read in place.

The copy goes in chunks, each digested while it is in the cache, and gives up Python's lock for each: whoever computes
meanwhile is held up by no more than the bookkeeping between two of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from diloco.tensorfile import LENGTH, METADATA_KEY, parse_header
from diloco.vault.errors import CorruptError, VaultError, VaultFullError
from diloco.vault.layout import Part
from service.errors import InputError

CHUNK_BYTES = 1 << 20
ALIGNMENT = 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA_STATE = "state"


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Place(NamedTuple):
    """Where a tensor lies in a part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Table(NamedTuple):
    """The header of a part, and where its tensors go."""

    header: bytes
    places: dict[str, Place]
    num_bytes: int


def table_of(tensors: Mapping[str, Tensor], state: Any = None) -> Table:
    """The table for these tensors, with state that is none.

    Raises:
        VaultError: a tensor is of a type that no part can hold.
    """
    entries: dict[str, Any] = {METADATA_KEY: {METADATA_STATE: json.dumps(state, separators=(",", ":"))}}
    places: dict[str, Place] = {}
    at = 0
    for name, tensor in tensors.items():
        code = CODES.get(tensor.dtype)
        if code is None or tensor.layout is not torch.strided:
            raise VaultError(f"{name} is a {tensor.dtype} tensor, which a snapshot cannot hold", field="vault")
        num_bytes = tensor.numel() * tensor.element_size()
        places[name] = Place(tensor.dtype, tuple(tensor.shape), at, num_bytes)
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + num_bytes]}
        at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % ALIGNMENT)
    header = LENGTH.pack(len(text)) + text
    moved = {name: place._replace(offset=place.offset + len(header)) for name, place in places.items()}
    return Table(header, moved, len(header) + at)


class PartWriter:
    """Fills a region with the tensors of a table."""

    def __init__(self, region: memoryview, table: Table) -> None:
        """Raises `VaultFullError`: the region is too small."""
        if table.num_bytes > len(region):
            raise VaultFullError(f"a part of {table.num_bytes} bytes does not fit into {len(region)}", field="vault")
        self._target = np.frombuffer(region, dtype=np.uint8, count=table.num_bytes)
        self._table = table
        self._target[: len(table.header)] = np.frombuffer(table.header, dtype=np.uint8)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor, not in chunks: for small ones, while inner steps stand still."""
        place = self._table.places[name]
        if place.num_bytes:
            view = _as_tensor(self._target[place.offset : place.offset + place.num_bytes], place)
            view.copy_(tensor.detach())

    def finish(self, tensors: Mapping[str, Tensor]) -> Part:
        """Copy these, and digest all; returns length and digest, as a part without name and region."""
        digest, at = xxhash.xxh3_128(), 0
        for name, place in self._table.places.items():
            self._digest(digest, at, place.offset)
            at = place.offset + place.num_bytes
            source = tensors.get(name)
            if source is None or not _is_plain(source):
                if source is not None:
                    self.put(name, source)
                self._digest(digest, place.offset, at)
            elif place.num_bytes:
                self._copy(digest, source.detach().reshape(-1).numpy().view(np.uint8), place.offset)
        self._digest(digest, at, self._table.num_bytes)
        return Part(name="", region=0, length=self._table.num_bytes, digest=digest.hexdigest())

    def _copy(self, digest: Any, source: Bytes, offset: int) -> None:
        for start in range(0, len(source), CHUNK_BYTES):
            chunk = source[start : start + CHUNK_BYTES]
            target = self._target[offset + start : offset + start + len(chunk)]
            np.copyto(target, chunk)
            # From where it was copied to: what is digested is what will be read.
            digest.update(target)

    def _digest(self, digest: Any, start: int, stop: int) -> None:
        for at in range(start, stop, CHUNK_BYTES):
            digest.update(self._target[at : min(at + CHUNK_BYTES, stop)])


class PartReader:
    """The tensors of a part, as views of where they lie: read-only by agreement."""

    def __init__(self, data: memoryview) -> None:
        """Raises `CorruptError`: it is no safetensors file, or one with types that are not known."""
        try:
            length = LENGTH.unpack_from(data)[0] if len(data) >= LENGTH.size else len(data)
            header = parse_header(bytes(data[: LENGTH.size + min(length, len(data))]))
            self.state = json.loads(header.metadata[METADATA_STATE])
            self._places = {name: _place(entry, header.data_offset) for name, entry in header.tensors.items()}
        except (InputError, KeyError, TypeError, ValueError) as exc:
            raise CorruptError(f"a part is no safetensors file: {exc}", field="vault") from exc
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        if any(place.offset + place.num_bytes > len(data) for place in self._places.values()):
            raise CorruptError("a tensor is outside of its part", field="vault")

    def names(self) -> Sequence[str]:
        return list(self._places)

    def place(self, name: str) -> Place:
        """Raises `CorruptError`: there is none of that name."""
        place = self._places.get(name)
        if place is None:
            raise CorruptError(f"has no tensor {name}", field="vault")
        return place

    def tensor(self, name: str) -> Tensor:
        """A view; copy it before the vault is closed or written to."""
        place = self.place(name)
        if place.num_bytes == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        return _as_tensor(self._bytes[place.offset : place.offset + place.num_bytes], place)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory is that of a NumPy array."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype is not torch.bfloat16


def _as_tensor(flat: Bytes, place: Place) -> Tensor:
    return torch.from_numpy(flat).view(place.dtype).view(place.shape)


def _place(entry: Any, data_offset: int) -> Place:
    start, stop = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
    if not 0 <= start <= stop or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError("offsets do not fit the shape")
    return Place(dtype, shape, data_offset + start, stop - start)
