"""The form of a vault, which is one file per rank (see docs/vault.md). Pure: bytes in, values out.

    header      magic, format, sizes, the table of regions, a digest of all that
    record 0    magic, sequence, length, digest, JSON of a `Generation`
    record 1    likewise
    regions     the parts of generations: raw bytes, each a safetensors file

A generation is a record and the parts that it names. Two of them are kept, in turn: the next one is written to the
record and to the regions that the other does not name. Its record is void meanwhile (sequence 0), and becomes valid
with the last eight bytes that are written, the sequence, which is the number of the generation. A part that has not
changed is named again, and not copied.

Whoever reads checks: the digest of a record covers its sequence and length, that of a part is in the record. A writer
that was killed leaves a void record, or one whose digest does not fit; the other generation is whole then.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash
from pydantic import Field, ValidationError

from diloco.schema import Count, Slot
from diloco.vault.errors import CorruptError, VaultFullError
from service.wire import Wire

FORMAT = 1
PAGE = 4096
NUM_RECORDS = 2
MAX_REGIONS = 1 << 16
MAX_REGION_BYTES = 1 << 44
MAX_RECORD_BYTES = 1 << 28
DIGEST_BYTES = 16

FILE_MAGIC = b"WDLVAULT"
RECORD_MAGIC = b"WDLGEN\x00\x01"
_FILE = struct.Struct("<8sIIQQ")
"""Magic, format, number of regions, bytes of the file, bytes of a record."""
_REGION = struct.Struct("<QQ")
"""Offset and bytes."""
_RECORD = struct.Struct("<8sQIIQ16s")
"""Magic, sequence, flags, zero, length of the JSON, digest."""
SEQUENCE = struct.Struct("<Q")
SEQUENCE_OFFSET = 8
FLAGS = struct.Struct("<I")
FLAGS_OFFSET = 16
RECORD_HEAD_BYTES = _RECORD.size

SURE = 0
UNSURE = 0xA5A5A5A5
"""A contribution was pushed of which no generation knows: what is restored must not be counted twice."""


@dataclass(frozen=True, slots=True)
class RegionNeed:
    """So many regions of so many bytes."""

    num_bytes: int
    count: int


class Region(NamedTuple):
    """A place for a part."""

    offset: int
    num_bytes: int


class Part(Wire):
    """Bytes of a generation, in one region."""

    name: str
    """``hot``, or ``global/F``, ``owed/F``, ``local/F/N``, ``left_out/F`` of fragment F; see docs/vault.md."""
    region: int = Field(ge=0)
    length: int = Field(ge=0)
    digest: str
    """xxh3-128 of the bytes, hex."""
    unique: bool = True
    """Nobody else has it; False of the global parameters, which the synchronizer has as long as they are current."""


class Generation(Wire):
    """One committed snapshot of one rank."""

    number: int = Field(ge=1)
    """Grows with each snapshot of the slot, over restarts too; the same on all ranks of an island."""
    run_id: str = ""
    """Of the controller's lease; empty without one."""
    instance: str = ""
    """Of the agent's process."""
    epoch: Count = 0
    slot: Slot
    rank: int = Field(ge=0)
    num_ranks: int = Field(ge=1)
    step: Count
    """Inner steps of the slot that are in it."""
    tokens: Count
    skipped: Count = 0
    versions: tuple[Count, ...] = ()
    """Of the global parameters of each fragment; of the first rank alone."""
    model: str
    """Digest of what it fits: names, shapes and types of the tensors, and the optimizer's settings."""
    taken_s: float = 0.0
    """Unix time."""
    parts: tuple[Part, ...]
    state: dict[str, Any] = Field(default_factory=dict)
    """All that is no tensor."""

    def part(self, name: str) -> Part:
        """Raises `CorruptError`: it has none of that name."""
        for part in self.parts:
            if part.name == name:
                return part
        raise CorruptError(f"generation {self.number} has no part {name}", field="vault")


@dataclass(frozen=True, slots=True)
class Layout:
    """The table at the beginning of a vault."""

    record_bytes: int
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, needs: Iterable[RegionNeed], *, record_bytes: int) -> Layout:
        """The layout with such regions."""
        sizes = [paged(need.num_bytes) for need in needs for _ in range(need.count)]
        record_bytes = paged(RECORD_HEAD_BYTES + record_bytes)
        if len(sizes) > MAX_REGIONS or record_bytes > MAX_RECORD_BYTES or max(sizes, default=0) > MAX_REGION_BYTES:
            raise VaultFullError("is larger than a vault can be", field="vault")
        offset = header_bytes(len(sizes)) + NUM_RECORDS * record_bytes
        regions = []
        for size in sizes:
            regions.append(Region(offset, size))
            offset += size
        return cls(record_bytes=record_bytes, regions=tuple(regions))

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        last = self.regions[-1] if self.regions else Region(self.record_offset(NUM_RECORDS), 0)
        return last.offset + last.num_bytes

    def record_offset(self, index: int) -> int:
        return header_bytes(len(self.regions)) + index * self.record_bytes

    def encode(self) -> bytes:
        """The header, whose last eight bytes before the padding are its digest."""
        head = _FILE.pack(FILE_MAGIC, FORMAT, len(self.regions), self.num_bytes, self.record_bytes)
        body = head + b"".join(_REGION.pack(*region) for region in self.regions)
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def decode(cls, data: bytes | memoryview, *, file_bytes: int) -> Layout:
        """The layout of a file that begins with ``data``.

        Raises:
            CorruptError: it is no vault of this format, or not whole.
        """
        if len(data) < _FILE.size:
            raise CorruptError("is too short for a vault", field="vault")
        magic, form, num_regions, num_bytes, record_bytes = _FILE.unpack_from(data)
        if magic != FILE_MAGIC or form != FORMAT or num_regions > MAX_REGIONS:
            raise CorruptError("is no vault of this version", field="vault")
        end = _FILE.size + num_regions * _REGION.size
        if len(data) < end + SEQUENCE.size or xxhash.xxh3_64_digest(data[:end]) != bytes(data[end : end + 8]):
            raise CorruptError("its header does not match its digest", field="vault")
        regions = tuple(Region(*_REGION.unpack_from(data, _FILE.size + i * _REGION.size)) for i in range(num_regions))
        found = cls(record_bytes=record_bytes, regions=regions)
        if found.num_bytes != num_bytes or file_bytes != num_bytes:
            raise CorruptError(f"has {file_bytes} bytes, and had {num_bytes}", field="vault")
        return found

    def fits(self, needs: Sequence[RegionNeed], *, record_bytes: int) -> bool:
        """Whether a vault of such needs would be laid out like this one."""
        return Layout.of(needs, record_bytes=record_bytes) == self


def header_bytes(num_regions: int) -> int:
    return paged(_FILE.size + num_regions * _REGION.size + SEQUENCE.size)


def paged(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def digest_of(data: bytes | memoryview) -> str:
    """xxh3-128, hex."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_record(generation: Generation, *, record_bytes: int) -> bytes:
    """A valid record; a writer puts its sequence down last.

    Raises:
        VaultFullError: it does not fit.
    """
    payload = generation.model_dump_json().encode()
    if RECORD_HEAD_BYTES + len(payload) > record_bytes:
        raise VaultFullError(f"a record of {len(payload)} bytes does not fit into {record_bytes}", field="vault")
    digest = _record_digest(generation.number, payload)
    return _RECORD.pack(RECORD_MAGIC, generation.number, SURE, 0, len(payload), digest) + payload


class ReadRecord(NamedTuple):
    """A record that was read."""

    generation: Generation
    is_sure: bool
    """False: a contribution was pushed later of which no generation knows."""


def decode_record(data: bytes | memoryview, layout: Layout) -> ReadRecord | None:
    """The generation of a record; None while it is void.

    Raises:
        CorruptError: it is torn or changed, or names regions that there are not.
    """
    magic, sequence, flags, zero, length, digest = _RECORD.unpack_from(data)
    if (magic, sequence, length) == (b"\0" * 8, 0, 0):
        return None  # never written
    if magic != RECORD_MAGIC or flags not in (SURE, UNSURE) or zero or length > len(data) - RECORD_HEAD_BYTES:
        raise CorruptError("a record is none", field="vault")
    if sequence == 0:
        return None
    payload = bytes(data[RECORD_HEAD_BYTES : RECORD_HEAD_BYTES + length])
    if _record_digest(sequence, payload) != digest:
        raise CorruptError(f"the record of generation {sequence} does not match its digest", field="vault")
    try:
        generation = Generation.model_validate_json(payload)
    except ValidationError as exc:
        raise CorruptError(f"generation {sequence}: {exc.errors()[0]['msg']}", field="vault") from exc
    check_places(generation, layout)
    return ReadRecord(generation, is_sure=flags == SURE)


def check_places(generation: Generation, layout: Layout) -> None:
    """Raises `CorruptError`: a part is where no part can be."""
    for part in generation.parts:
        if part.region >= len(layout.regions) or part.length > layout.regions[part.region].num_bytes:
            raise CorruptError(f"part {part.name} of generation {generation.number} is outside", field="vault")


def choose_regions(layout: Layout, lengths: Sequence[int], *, taken: Iterable[int]) -> list[int]:
    """A free region for each length, the smallest that it fits into.

    Raises:
        VaultFullError: there is none.
    """
    free = sorted(set(range(len(layout.regions))) - set(taken), key=lambda i: (layout.regions[i].num_bytes, i))
    chosen = [-1] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        found = next((region for region in free if layout.regions[region].num_bytes >= lengths[index]), None)
        if found is None:
            raise VaultFullError(
                f"no region is free for {lengths[index]} bytes",
                field="vault",
                remedy="the state has grown since the start",
            )
        free.remove(found)
        chosen[index] = found
    return chosen


def _record_digest(sequence: int, payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(SEQUENCE.pack(sequence) + SEQUENCE.pack(len(payload)) + payload)
