"""Writes one slot of a gate, and keeps proving that its process lives.

Nothing here raises or blocks: a folder that is missing, read-only or full switches the gate off with one line in the
log, and the heartbeat tries again. Slots are claimed under a file lock that is only ever tried; writes take none.
A slot whose process is dead is free for the next claim, so that a killed server leaves no count behind.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .files import open_regular
from .identity import is_known_dead, make_directory, own_identity
from .log import plugin_logger
from .records import (
    EMPTY_SLOT,
    GATE_BYTES,
    GATE_FILE,
    MAGIC_FAMILY,
    NUM_SLOTS,
    SLOT_BYTES,
    Slot,
    SlotFlag,
    clamp_count,
    decode_slot,
    gate_header,
    pack_slot,
    slot_offset,
)

logger = plugin_logger(__name__)

HEARTBEAT_PERIOD_S = 0.2
ABANDONED_NS = 600 * 10**9
"""A slot of a process that cannot be looked up, silent for so long, is free: a stopped engine may come back before."""
KINDS = SlotFlag.INGRESS | SlotFlag.ENGINE | SlotFlag.SIDECAR
"""What a slot speaks of for all its life; other flags come and go."""

_held: set[tuple[int, int, int, int]] = set()
"""Slots that writers of this process hold: process id, device, inode, index. Changed under the lock of the file."""


class GateError(Exception):
    """Why there is no slot to write into."""


class GateWriter:
    """One slot: `update` says what changed, `beat` that the process lives."""

    def __init__(self, directory: Path, flags: int, *, engine: int = 0) -> None:
        self._path = directory / GATE_FILE
        self._identity = own_identity()
        self._sequence = 0
        self._changed_ns = 0
        self._in_flight = self._running = self._waiting = 0
        self._pace = 1.0
        self._flags = flags
        self._engine = engine
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._offset = 0
        self._holding = (0, 0, 0, 0)
        self._complaint = ""
        self._closed = False
        self.beat()

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    @property
    def complaint(self) -> str:
        """Why it is not open; empty when it is."""
        return self._complaint

    def update(
        self,
        *,
        in_flight: int | None = None,
        running: int | None = None,
        waiting: int | None = None,
        pace: float | None = None,
        flags: int | None = None,
    ) -> None:
        """Write what is given; the rest stays."""
        if os.getpid() != self._identity.pid:
            return  # a forked child: the slot is its parent's
        with self._lock:
            if in_flight is not None:
                self._in_flight = clamp_count(in_flight)
            if running is not None:
                self._running = clamp_count(running)
            if waiting is not None:
                self._waiting = clamp_count(waiting)
            if pace is not None:
                self._pace = pace
            if flags is not None:
                self._flags = flags
            self._changed_ns = time.monotonic_ns()
            if self._fd is not None:
                self._write(self._fd)

    def beat(self) -> None:
        """Prove life; take a slot (again) if there is none, or if the file was replaced."""
        if os.getpid() != self._identity.pid or self._closed:
            return
        with self._lock:
            try:
                if self._fd is not None and not self._still_ours(self._fd):
                    self._drop()
                if self._fd is None:
                    self._claim()
            except (OSError, GateError) as exc:
                self._drop()
                self._complain(exc)
                return
            if self._fd is not None:
                self._write(self._fd)
        self._complaint = ""

    def close(self) -> None:
        """Give the slot back."""
        if os.getpid() != self._identity.pid:
            return
        with self._lock:
            self._closed = True
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    if self._still_ours(self._fd):
                        os.pwrite(self._fd, EMPTY_SLOT, self._offset)
                self._drop()

    def abandon(self) -> None:
        """Leave the slot as it is: what it says holds until readers take its writer for dead."""
        if os.getpid() != self._identity.pid:
            return
        with self._lock:
            self._closed = True
            if self._fd is not None:
                self._drop()

    def _write(self, fd: int) -> None:
        try:
            os.pwrite(fd, self._encode(), self._offset)
        except OSError as exc:
            self._drop()
            self._complain(exc)

    def _encode(self) -> bytes:
        self._sequence += 1
        owner = self._identity
        return pack_slot(
            self._sequence,
            time.monotonic_ns(),
            self._changed_ns,
            self._in_flight,
            self._running,
            self._waiting,
            self._pace,
            self._flags,
            self._engine,
            owner.pid,
            owner.start_ticks,
            owner.pid_namespace,
        )

    def _claim(self) -> None:
        make_directory(self._path.parent)
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _prepare(fd)
            index = self._find_slot(fd)
            self._offset = slot_offset(index)
            # Written before the lock is gone: a free slot is one that nobody has written.
            os.pwrite(fd, self._encode(), self._offset)
            self._holding = self._key(fd, index)
            _held.add(self._holding)
            fcntl.flock(fd, fcntl.LOCK_UN)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _find_slot(self, fd: int) -> int:
        """The index of a slot to take. One that this writer once left behind comes first, and further ones are freed:
        their process lives, so that nobody else could take them for dead, and readers would wait for them for ever.

        Raises:
            GateError: all are taken.
        """
        slots = _read_slots(fd)
        left = [index for index, slot in enumerate(slots) if self._is_left_behind(slot, self._key(fd, index))]
        for index in left[1:]:
            os.pwrite(fd, EMPTY_SLOT, slot_offset(index))
        if left:
            return left[0]
        for index, slot in enumerate(slots):
            if slot is None or _is_abandoned(slot):
                return index
        raise GateError(f"all {NUM_SLOTS} slots are taken")

    def _is_left_behind(self, slot: Slot | None, key: tuple[int, int, int, int]) -> bool:
        if slot is None or key in _held or slot.owner != self._identity:
            return False
        return (slot.flags & KINDS, slot.engine) == (self._flags & KINDS, self._engine)

    def _key(self, fd: int, index: int) -> tuple[int, int, int, int]:
        found = os.fstat(fd)
        return self._identity.pid, found.st_dev, found.st_ino, index

    def _still_ours(self, fd: int) -> bool:
        """Whether the file is a whole gate, and this writer's slot in it; what follows its slots does not matter."""
        here, there = os.fstat(fd), os.stat(self._path, follow_symlinks=False)  # noqa: PTH116 (five times a second)
        if (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev) or here.st_size < GATE_BYTES:
            return False
        if os.pread(fd, SLOT_BYTES, 0) != gate_header():
            return False
        slot = decode_slot(os.pread(fd, SLOT_BYTES, self._offset))
        return slot is not None and (slot.pid, slot.flags, slot.engine) == (
            self._identity.pid,
            self._flags,
            self._engine,
        )

    def _drop(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
            _held.discard(self._holding)

    def _complain(self, error: Exception) -> None:
        if not self._complaint:
            logger.warning("gate is off, training beside this server will yield path=%s error=%s", self._path, error)
        self._complaint = f"{type(error).__name__}: {error}"


class Heartbeat:
    """A daemon thread that calls every added function some five times a second, until the process ends."""

    def __init__(self, period_s: float = HEARTBEAT_PERIOD_S) -> None:
        self._period_s = period_s
        self._beats: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, beat: Callable[[], None]) -> None:
        self._beats.append(beat)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="wadiloco-gate", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * self._period_s)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            for beat in tuple(self._beats):
                try:
                    beat()
                except Exception:  # a heartbeat that ends would look like a dead server
                    logger.exception("heartbeat failed")


_heartbeat: tuple[int, Heartbeat] | None = None
"""Of this process, with its id: threads do not survive a fork."""


def process_heartbeat() -> Heartbeat:
    """The one heartbeat of this process."""
    global _heartbeat
    if _heartbeat is None or _heartbeat[0] != os.getpid():
        _heartbeat = (os.getpid(), Heartbeat())
    return _heartbeat[1]


def open_slot(directory: Path | None, flags: int, *, engine: int = 0) -> GateWriter | None:
    """A slot that this process keeps alive until it ends; None when the gate is switched off."""
    if directory is None:
        return None
    writer = GateWriter(directory, flags, engine=engine)
    process_heartbeat().add(writer.beat)
    atexit.register(writer.close)
    return writer


def _prepare(fd: int) -> None:
    """Make the file a gate, if it is empty, or a gate of another version or cut short.

    Raises:
        GateError: it is something else.
    """
    header, wanted = os.pread(fd, SLOT_BYTES, 0), gate_header()
    if header == wanted and os.fstat(fd).st_size >= GATE_BYTES:
        return
    if not header.startswith(MAGIC_FAMILY) and not MAGIC_FAMILY.startswith(header.rstrip(b"\0")):
        raise GateError("the file is no gate; name another folder, or remove it")
    if header != wanted:
        os.ftruncate(fd, 0)
    os.ftruncate(fd, GATE_BYTES)
    os.pwrite(fd, wanted, 0)


def _read_slots(fd: int) -> list[Slot | None]:
    raw = os.pread(fd, GATE_BYTES, 0)
    return [decode_slot(raw[start : start + SLOT_BYTES]) for start in map(slot_offset, range(NUM_SLOTS))]


def _is_abandoned(slot: Slot) -> bool:
    return is_known_dead(slot.owner) or time.monotonic_ns() - slot.heartbeat_ns > ABANDONED_NS
