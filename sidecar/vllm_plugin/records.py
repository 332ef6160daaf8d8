"""Layout of the gate and of the ring of step records: little-endian, fixed size, versioned.

    gate   64 bytes of header, then `NUM_SLOTS` slots of 64 bytes, one per writer
    ring   128 bytes of header, then `RING_CAPACITY` records of 512 bytes: counts and totals, a CRC of what is used, and
           latencies (fp32): of finished requests three each, then TTFTs, then ITLs

A slot or record is written in one piece and carries its sequence number and a CRC: a reader that meets a half-written
one sees that the CRC does not match, on any memory model, and reads again.
Times are nanoseconds of ``CLOCK_MONOTONIC``, which all processes of a host share.
"""

from __future__ import annotations

import array
import struct
import zlib
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

from .identity import Identity

GATE_FILE = "gate"
SLOT_BYTES = 64
NUM_SLOTS = 31
GATE_MAGIC = b"WDLGATE\x01"
MAGIC_FAMILY = b"WDLGATE"
"""How a gate of any version begins."""
EMPTY_SLOT = bytes(SLOT_BYTES)
GATE_BYTES = SLOT_BYTES * (1 + NUM_SLOTS)

RING_MAGIC = b"WDLRING\x02"
RING_MAGIC_FAMILY = b"WDLRING"
"""How a ring of any version begins."""
RING_HEADER_BYTES = 128
RECORD_BYTES = 512
RING_CAPACITY = 4096
"""Forty seconds at 100 steps/s: a sidecar that polls each second may miss dozens of polls."""

_SLOT = struct.Struct("<QQQIIIfHHIQI")
_CRC = struct.Struct("<I")
_RING_HEADER = struct.Struct("<8sIIIIQIIQ12x")
_PULSE = struct.Struct("<QQ")
_RECORD = struct.Struct("<QQQIIfHHHHIQQQQQ")
_VALUES_AT = _RECORD.size + _CRC.size
VALUE_BYTES = 4
VALUES_PER_RECORD = (RECORD_BYTES - _VALUES_AT) // VALUE_BYTES
VALUES_PER_REQUEST = 3
"""Divides `VALUES_PER_RECORD`: no request is split between two records."""
PULSE_OFFSET = 64
MAX_COUNT = (1 << 32) - 1


class SlotFlag:
    """What a slot speaks of. Plain integers: the arithmetic of an enumeration costs a microsecond each time."""

    NONE: Final = 0
    INGRESS: Final = 1
    """``in_flight`` is the number of HTTP requests in one API-server process."""
    ENGINE: Final = 2
    """``running`` and ``waiting`` are those of one engine, as of its last step."""
    SIDECAR: Final = 4
    """``pace`` holds."""
    SCRAPED: Final = 8
    """The sidecar's last scrape is recent: ``running`` and ``waiting`` hold."""
    RUN_ORDERED: Final = 16
    """An operator ordered the trainer to run, whatever the load is."""


class RecordFlag:
    NONE: Final = 0
    CONTINUED: Final = 1
    """More values of the same step than one record holds: this one goes on with them."""
    NO_SCHEDULER_STATS: Final = 2
    """The step came without scheduler statistics: running, waiting and KV usage are those of the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one writer says."""

    sequence: int = 0
    heartbeat_ns: int = 0
    changed_ns: int = 0
    """When the counts were last written."""
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    pace: float = 1.0
    flags: int = SlotFlag.NONE
    """Of `SlotFlag`."""
    engine: int = 0
    pid: int = 0
    start_ticks: int = 0
    """Start time of the process as the kernel counts it: process ids are used again. 0 is unknown."""
    pid_namespace: int = 0
    """Process ids mean something only to processes of the same namespace. 0 is unknown."""

    @property
    def owner(self) -> Identity:
        """The process that writes it."""
        return Identity(self.pid, self.start_ticks, self.pid_namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHeader:
    """Whose steps a ring holds."""

    pid: int
    engine: int
    start_ticks: int
    pid_namespace: int
    max_num_seqs: int
    """Requests that the engine runs at once; 0 is unknown."""
    created_ns: int


class FinishedRequest(NamedTuple):
    """The latencies of one request, known together when it has ended. NaN is unknown."""

    ttft_s: float
    tpot_s: float
    """Mean time per output token after the first; 0 for an answer of one token."""
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step. The totals count from the start of the ring, so that a record that was missed loses none."""

    sequence: int
    """Place in the ring's life, from 1; also the number of records written so far."""
    at_ns: int
    step: int
    running: int
    waiting: int
    kv_usage: float
    """0 to 1; NaN is unknown."""
    flags: int = RecordFlag.NONE
    """Of `RecordFlag`."""
    dropped_values: int = 0
    """Latencies of this step beyond what its records can hold."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    finished_total: int = 0
    first_tokens_total: int = 0
    finished: tuple[FinishedRequest, ...] = ()
    ttft_s: tuple[float, ...] = ()
    itl_s: tuple[float, ...] = ()


def gate_header() -> bytes:
    body = struct.pack("<8sII44x", GATE_MAGIC, SLOT_BYTES, NUM_SLOTS)
    return body + _CRC.pack(zlib.crc32(body))


def slot_offset(index: int) -> int:
    return SLOT_BYTES * (1 + index)


def pack_slot(*fields: float) -> bytes:
    """64 bytes of the fields of a `Slot`, in its order.

    Raises:
        struct.error: one is not within its range.
    """
    body = _SLOT.pack(*fields)
    return body + _CRC.pack(zlib.crc32(body))


def encode_slot(slot: Slot) -> bytes:
    return pack_slot(*astuple(slot))


def decode_slot(raw: bytes) -> Slot | None:
    """The slot in 64 bytes; None when they are torn, damaged or free."""
    if len(raw) != SLOT_BYTES or zlib.crc32(raw[:-4]) != _CRC.unpack_from(raw, SLOT_BYTES - 4)[0]:
        return None
    return Slot(**dict(zip(Slot.__dataclass_fields__, _SLOT.unpack_from(raw), strict=True)))


def encode_ring_header(header: RingHeader) -> bytes:
    body = _RING_HEADER.pack(
        RING_MAGIC,
        RECORD_BYTES,
        RING_CAPACITY,
        header.pid,
        header.engine,
        header.start_ticks,
        header.pid_namespace,
        header.max_num_seqs,
        header.created_ns,
    )
    return body + _CRC.pack(zlib.crc32(body))


def decode_ring_header(raw: bytes) -> RingHeader | None:
    """The header; None when it is damaged, or of another version or size."""
    if len(raw) < PULSE_OFFSET or zlib.crc32(raw[: PULSE_OFFSET - 4]) != _CRC.unpack_from(raw, PULSE_OFFSET - 4)[0]:
        return None
    magic, record_bytes, capacity, pid, engine, ticks, namespace, seqs, created_ns = _RING_HEADER.unpack_from(raw)
    if (magic, record_bytes, capacity) != (RING_MAGIC, RECORD_BYTES, RING_CAPACITY):
        return None
    return RingHeader(
        pid=pid,
        engine=engine,
        start_ticks=ticks,
        pid_namespace=namespace,
        max_num_seqs=seqs,
        created_ns=created_ns,
    )


def encode_pulse(heartbeat_ns: int, written: int) -> bytes:
    return _PULSE.pack(heartbeat_ns, written)


def decode_pulse(raw: bytes) -> tuple[int, int] | None:
    """(heartbeat, records written by then) from a ring's header."""
    if len(raw) < PULSE_OFFSET + _PULSE.size:
        return None
    heartbeat_ns, written = _PULSE.unpack_from(raw, PULSE_OFFSET)
    return heartbeat_ns, written


def record_offset(sequence: int) -> int:
    return RING_HEADER_BYTES + RECORD_BYTES * ((sequence - 1) % RING_CAPACITY)


def pack_record(fixed: tuple[float, ...], values: bytes) -> bytes:
    """The used part of a record: the fields of a `StepRecord`, and its latencies (fp32) one after another.

    ``fixed`` is in the order of the fields, with the numbers of finished requests, TTFTs and ITLs after ``kv_usage``.

    Raises:
        ValueError: more latencies than fit.
        struct.error: a field is not within its range.
    """
    if len(values) > VALUE_BYTES * VALUES_PER_RECORD:
        raise ValueError(f"{len(values) // VALUE_BYTES} latencies, a record holds {VALUES_PER_RECORD}")
    head = _RECORD.pack(*fixed)
    return head + _CRC.pack(zlib.crc32(values, zlib.crc32(head))) + values


def encode_record(record: StepRecord) -> bytes:
    """All 512 bytes of a record."""
    groups = (record.finished, record.ttft_s, record.itl_s)
    fields = astuple(record)[: -len(groups)]
    values = (value for request in record.finished for value in request)
    packed = array.array("f", (*values, *record.ttft_s, *record.itl_s)).tobytes()
    return pack_record((*fields[:6], *map(len, groups), *fields[6:]), packed).ljust(RECORD_BYTES, b"\0")


def decode_record(raw: bytes) -> StepRecord | None:
    """The record in 512 bytes; None when they are torn, damaged or were never written."""
    if len(raw) != RECORD_BYTES:
        return None
    (
        *head, num_finished, num_ttft, num_itl, flags, dropped, prompt, generation, preemptions, finished, first_tokens,
    ) = _RECORD.unpack_from(raw)  # fmt: skip
    ttft_at = VALUES_PER_REQUEST * num_finished
    count = ttft_at + num_ttft + num_itl
    end = _VALUES_AT + VALUE_BYTES * count
    if end > RECORD_BYTES:
        return None
    crc = zlib.crc32(raw[_VALUES_AT:end], zlib.crc32(raw[: _RECORD.size]))
    if crc != _CRC.unpack_from(raw, _RECORD.size)[0]:
        return None
    values: tuple[float, ...] = struct.unpack_from(f"<{count}f", raw, _VALUES_AT)
    sequence, at_ns, step, running, waiting, kv_usage = head
    return StepRecord(
        sequence=sequence,
        at_ns=at_ns,
        step=step,
        running=running,
        waiting=waiting,
        kv_usage=kv_usage,
        flags=flags,
        dropped_values=dropped,
        prompt_tokens_total=prompt,
        generation_tokens_total=generation,
        preemptions_total=preemptions,
        finished_total=finished,
        first_tokens_total=first_tokens,
        finished=tuple(
            FinishedRequest(*values[at : at + VALUES_PER_REQUEST]) for at in range(0, ttft_at, VALUES_PER_REQUEST)
        ),
        ttft_s=values[ttft_at : ttft_at + num_ttft],
        itl_s=values[ttft_at + num_ttft :],
    )


def clamp_count(value: object) -> int:
    """``value`` as a count that fits; 0 when it is none."""
    return min(max(value, 0), MAX_COUNT) if isinstance(value, int) else 0
