"""What a trainer beside a server says of itself at this moment: a record in a file of its own, in the gate's folder."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import StrEnum

TRAINER_GLOB = "trainer-*.phase"
"""One file per trainer, in the folder of the gate."""
TRAINER_BEAT_S = 0.2
"""Longest time between two writes of a living trainer."""
TRAINER_MAGIC = b"WDLTRNR\x01"
_TRAINER = struct.Struct("<8sQQQQQIHH")
_CRC = struct.Struct("<I")
TRAINER_BYTES = _TRAINER.size + _CRC.size


class TrainerPhase(StrEnum):
    """What a trainer does to the server beside it."""

    NONE = "none"
    """Waits for the server, is paused, or does not train yet."""
    INNER = "inner"
    SYNC = "sync"
    """From the order to sync until the new global parameters are applied."""


TRAINER_PHASES = tuple(TrainerPhase)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    """What one trainer has done until ``at_ns`` (``CLOCK_MONOTONIC``, which all processes of a host share).

    Little-endian, fixed size, written in one piece with a sequence number and a CRC: a reader that meets a half-written
    record sees that the CRC does not match, and reads again. The times are totals, so that whoever reads now and then
    takes their difference and misses nothing.
    """

    sequence: int
    at_ns: int
    """Also the heartbeat: written at least every `TRAINER_BEAT_S`."""
    none_ns: int = 0
    inner_ns: int = 0
    sync_ns: int = 0
    pid: int = 0
    slot: int = 0
    phase: TrainerPhase = TrainerPhase.NONE
    """At ``at_ns``."""

    def spent_ns(self, phase: TrainerPhase) -> int:
        return {TrainerPhase.NONE: self.none_ns, TrainerPhase.INNER: self.inner_ns, TrainerPhase.SYNC: self.sync_ns}[
            phase
        ]


def encode_trainer(record: TrainerRecord) -> bytes:
    """`TRAINER_BYTES` bytes.

    Raises:
        struct.error: a field is not within its range.
    """
    body = _TRAINER.pack(
        TRAINER_MAGIC,
        record.sequence,
        record.at_ns,
        record.none_ns,
        record.inner_ns,
        record.sync_ns,
        record.pid,
        record.slot,
        TRAINER_PHASES.index(record.phase),
    )
    return body + _CRC.pack(zlib.crc32(body))


def decode_trainer(raw: bytes) -> TrainerRecord | None:
    """The record; None when it is torn, damaged, or of another version."""
    if len(raw) != TRAINER_BYTES or zlib.crc32(raw[:-4]) != _CRC.unpack_from(raw, TRAINER_BYTES - 4)[0]:
        return None
    magic, sequence, at_ns, none_ns, inner_ns, sync_ns, pid, slot, phase = _TRAINER.unpack_from(raw)
    if magic != TRAINER_MAGIC or phase >= len(TRAINER_PHASES):
        return None
    return TrainerRecord(
        sequence=sequence,
        at_ns=at_ns,
        none_ns=none_ns,
        inner_ns=inner_ns,
        sync_ns=sync_ns,
        pid=pid,
        slot=slot,
        phase=TRAINER_PHASES[phase],
    )
