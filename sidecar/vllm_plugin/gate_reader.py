"""Reads a gate: is the server busy now?

    an operator's order to run, and no other sidecar's
    pace is 0                                            → open
    the sidecar's pace is 0                              → busy
    a sidecar that died with its order                  → unknown
    a living writer's counts above zero                 → busy
    a silent writer that may still live                 → unknown (in another container: for `REPLACED_NS` at most,
                                                          once another of its kind lives)
    no living writer, no file, or a file that is no gate → unknown
    else                                                → open

Unknown is busy. Requests in flight count before the engine's, those before the sidecar's scrape. An idle server writes
nothing, so the age of a count says nothing: a writer lives by its heartbeat. Of one engine, which may report through
several API servers in turn, the newest slot holds. Where no request is in flight and an engine has not stepped for
`LEFTOVER_NS`, what it said last is a leftover: the report of its last step went to an API server that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from .files import open_regular
from .identity import Identity, is_foreign, is_known_dead
from .records import EMPTY_SLOT, GATE_BYTES, GATE_FILE, SLOT_BYTES, Slot, SlotFlag, decode_slot, gate_header

ALIVE_NS = 2 * 10**9
"""Ten heartbeats. A heartbeat thread of a saturated API server was seen to be late by half a second."""
AHEAD_NS = 10 * 10**9
"""A heartbeat further in the future is of another boot, or garbage."""
REPLACED_NS = 60 * 10**9
"""A container that was killed leaves a slot that nobody can call dead from outside; its successor speaks for it."""
LEFTOVER_NS = 2 * 10**9
JUDGE_AGAIN_NS = 500_000_000
REOPEN_NS = 100_000_000
"""How often the path is looked up: a file that was replaced is noticed within it."""
ATTEMPTS = 4
"""Reads of a gate in which some slot is torn: a writer needs a microsecond."""

LOAD_FLAGS = SlotFlag.INGRESS | SlotFlag.ENGINE | SlotFlag.SCRAPED
ALL_SOURCES = LOAD_FLAGS | SlotFlag.SIDECAR | SlotFlag.RUN_ORDERED


class GateReason(StrEnum):
    """Why the gate is as it is."""

    IDLE = "idle"
    RUN_ORDERED = "run_ordered"
    IN_FLIGHT = "in_flight"
    ENGINE = "engine"
    SCRAPED = "scraped"
    NO_PACE = "no_pace"
    SIDECAR_DEAD = "sidecar_dead"
    WRITER_SILENT = "writer_silent"
    NO_WRITER = "no_writer"
    NO_FILE = "no_file"
    FOREIGN = "foreign"
    TORN = "torn"


UNKNOWN_REASONS = frozenset(
    {
        GateReason.SIDECAR_DEAD,
        GateReason.WRITER_SILENT,
        GateReason.NO_WRITER,
        GateReason.NO_FILE,
        GateReason.FOREIGN,
        GateReason.TORN,
    }
)


@dataclass(frozen=True, slots=True)
class GateState:
    """What the gate says. A count that no living writer knows is None."""

    busy: bool
    reason: GateReason
    source: str | None = None
    """Whose counts these are: ``ingress``, ``engine`` or ``scrape``; None when nobody's."""
    in_flight: int | None = None
    running: int | None = None
    waiting: int | None = None
    pace: float = 1.0
    """How much of the time a trainer may run while the gate is open."""
    sidecars: int = 0
    """Living sidecars that write this gate."""

    @property
    def is_known(self) -> bool:
        return self.reason not in UNKNOWN_REASONS


class GateReader:
    """Reads the gate in one folder; `read` costs about a microsecond while nothing changes, and never raises."""

    def __init__(self, directory: Path, *, sources: int = ALL_SOURCES) -> None:
        """``sources`` leaves slots out that speak of nothing in it."""
        self._path = directory / GATE_FILE
        self._sources = sources
        self._header = gate_header()
        self._fd: int | None = None
        self._inode = (0, 0)
        self._look_again_ns = 0
        self._missing = GateReason.NO_FILE
        self._raw = b""
        self._judged_until_ns = 0
        self._state = GateState(True, GateReason.NO_FILE)

    def read(self, now_s: float) -> GateState:
        """The state at ``now_s`` (`time.monotonic`)."""
        now_ns = int(now_s * 1e9)
        if not 0 <= self._look_again_ns - now_ns <= REOPEN_NS:
            self._look_up()
            self._look_again_ns = now_ns + REOPEN_NS
        raw = self._fetch()
        if raw == self._raw and self._judged_until_ns - JUDGE_AGAIN_NS <= now_ns < self._judged_until_ns:
            return self._state
        self._state, self._raw = self._judge(raw, now_ns), raw
        self._judged_until_ns = now_ns + JUDGE_AGAIN_NS
        return self._state

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _look_up(self) -> None:
        """Open the file, or open it again if the path leads to another one by now."""
        try:
            found = os.stat(self._path, follow_symlinks=False)  # noqa: PTH116 (within a training step)
            if self._fd is not None and (found.st_dev, found.st_ino) == self._inode:
                return
            self.close()
            self._fd = open_regular(self._path, os.O_RDONLY)
            opened = os.fstat(self._fd)
            self._inode = (opened.st_dev, opened.st_ino)
        except OSError as exc:
            self._missing = GateReason.NO_FILE if isinstance(exc, FileNotFoundError) else GateReason.FOREIGN
            self.close()

    def _fetch(self) -> bytes:
        if self._fd is None:
            return b""
        try:
            return os.pread(self._fd, GATE_BYTES, 0)
        except OSError:
            return b""

    def _judge(self, raw: bytes, now_ns: int) -> GateState:
        if self._fd is None:
            return GateState(True, self._missing)
        for _ in range(ATTEMPTS):
            if len(raw) != GATE_BYTES or raw[:SLOT_BYTES] != self._header:
                return GateState(True, GateReason.FOREIGN)
            slots, is_torn = self._decode(raw)
            if not is_torn:
                return judge(slots, now_ns)
            raw = self._fetch()
        return GateState(True, GateReason.TORN)

    def _decode(self, raw: bytes) -> tuple[list[Slot], bool]:
        slots, is_torn = [], False
        for start in range(SLOT_BYTES, GATE_BYTES, SLOT_BYTES):
            piece = raw[start : start + SLOT_BYTES]
            if piece == EMPTY_SLOT:
                continue
            slot = decode_slot(piece)
            if slot is None:
                is_torn = True
            elif slot.flags & self._sources:
                slots.append(slot)
        return slots, is_torn


def judge(slots: Iterable[Slot], now_ns: int, *, is_dead: Callable[[Identity], bool] = is_known_dead) -> GateState:
    """The state that the slots of one gate amount to; ``is_dead`` says whether a silent writer's process is gone."""
    living: list[Slot] = []
    silent: list[Slot] = []
    for slot in slots:
        age_ns = now_ns - slot.heartbeat_ns
        (living if -AHEAD_NS < age_ns <= ALIVE_NS else silent).append(slot)

    def is_replaced(slot: Slot) -> bool:
        is_recent = -AHEAD_NS < now_ns - slot.heartbeat_ns <= REPLACED_NS  # one from the future is of another boot
        kind = slot.flags & LOAD_FLAGS, slot.engine
        has_successor = any((other.flags & LOAD_FLAGS, other.engine) == kind for other in living)
        return not is_recent and has_successor and is_foreign(slot.owner)

    ingress = [slot for slot in living if slot.flags & SlotFlag.INGRESS]
    engines = _newest_per_engine(slot for slot in living if slot.flags & SlotFlag.ENGINE)
    sidecars = [slot for slot in living if slot.flags & SlotFlag.SIDECAR]
    in_flight = sum(slot.in_flight for slot in ingress) if ingress else None
    if in_flight == 0:
        engines = [slot for slot in engines if now_ns - slot.changed_ns <= LEFTOVER_NS]
    exact = bool(ingress or engines)
    counted = engines if exact else [slot for slot in living if slot.flags & SlotFlag.SCRAPED]
    source = "ingress" if ingress else "engine" if engines else "scrape" if counted else None
    is_ordered = any(slot.flags & SlotFlag.RUN_ORDERED for slot in sidecars) and all(
        slot.flags & SlotFlag.RUN_ORDERED or _fraction(slot.pace) > 0.0 for slot in sidecars
    )  # of two sidecars on one gate, a pause at one wins over an order to run at the other
    counts = Counts(
        in_flight=in_flight,
        running=sum(slot.running for slot in counted) if counted else None,
        waiting=sum(slot.waiting for slot in counted) if counted else None,
        pace=1.0 if is_ordered else min((_fraction(slot.pace) for slot in sidecars), default=1.0),
    )
    if is_ordered:
        reason = GateReason.RUN_ORDERED
    elif counts.pace == 0.0:
        reason = GateReason.NO_PACE
    elif not sidecars and any(slot.flags & SlotFlag.SIDECAR for slot in silent):
        reason = GateReason.SIDECAR_DEAD
    elif counts.in_flight:
        reason = GateReason.IN_FLIGHT
    elif counts.running or counts.waiting:
        reason = GateReason.ENGINE if exact else GateReason.SCRAPED
    elif any(slot.flags & LOAD_FLAGS and not is_dead(slot.owner) and not is_replaced(slot) for slot in silent):
        reason = GateReason.WRITER_SILENT
    else:
        reason = GateReason.NO_WRITER if source is None else GateReason.IDLE
    is_open = reason in (GateReason.IDLE, GateReason.RUN_ORDERED)
    return GateState(
        not is_open, reason, source, counts.in_flight, counts.running, counts.waiting, counts.pace, len(sidecars)
    )


class Counts(NamedTuple):
    in_flight: int | None
    running: int | None
    waiting: int | None
    pace: float


def _newest_per_engine(slots: Iterable[Slot]) -> list[Slot]:
    newest: dict[int, Slot] = {}
    for slot in slots:
        known = newest.get(slot.engine)
        if known is None or slot.changed_ns > known.changed_ns:
            newest[slot.engine] = slot
    return list(newest.values())


def _fraction(value: float) -> float:
    """``value`` within 0 and 1; what is no number is 0."""
    return min(max(value, 0.0), 1.0) if value == value else 0.0
