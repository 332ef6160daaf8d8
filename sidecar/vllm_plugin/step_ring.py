"""Writes the ring of step records of one engine; like the gate's writer it never raises and never blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from .identity import Identity, is_known_dead, make_directory, own_identity
from .records import (
    PULSE_OFFSET,
    RECORD_BYTES,
    RING_CAPACITY,
    RING_HEADER_BYTES,
    RingHeader,
    decode_ring_header,
    encode_pulse,
    encode_ring_header,
    record_offset,
)

logger = logging.getLogger(__name__)

RING_GLOB = "steps-*.ring"
RING_BYTES = RING_HEADER_BYTES + RECORD_BYTES * RING_CAPACITY


class StepRing:
    """The file ``steps-ENGINE-PID.ring`` of one engine, as one API server sees it."""

    def __init__(self, directory: Path, *, engine: int, max_num_seqs: int = 0) -> None:
        self._identity = own_identity()
        self._path = directory / f"steps-{engine}-{self._identity.pid}.ring"
        self._header = RingHeader(
            pid=self._identity.pid,
            engine=engine,
            start_ticks=self._identity.start_ticks,
            pid_namespace=self._identity.pid_namespace,
            max_num_seqs=max_num_seqs,
            created_ns=time.monotonic_ns(),
        )
        self._written = 0
        self._fd: int | None = None
        self._complaint = ""
        self.beat()

    @property
    def next_sequence(self) -> int:
        return self._written + 1

    def write(self, records: Sequence[bytes]) -> None:
        """Write records from `next_sequence` on; all but the last must be full, so that they follow one another."""
        first = self._written + 1
        until_end = RING_CAPACITY - (first - 1) % RING_CAPACITY
        try:
            if self._fd is not None and os.getpid() == self._identity.pid:
                os.pwrite(self._fd, b"".join(records[:until_end]), record_offset(first))
                if len(records) > until_end:
                    os.pwrite(self._fd, b"".join(records[until_end:]), record_offset(first + until_end))
        except OSError as exc:
            self._fail(exc)
        self._written += len(records)  # last: the heartbeat's thread must not tell of records that are not there yet

    def beat(self) -> None:
        """Prove life; make the file (again) if it is not there."""
        if os.getpid() != self._identity.pid:
            return
        try:
            if self._fd is None or not self._path.exists():
                self._open()
            assert self._fd is not None
            if os.fstat(self._fd).st_size < RING_BYTES:
                self._lay_out(self._fd)
            os.pwrite(self._fd, encode_pulse(time.monotonic_ns(), self._written), PULSE_OFFSET)
        except OSError as exc:
            self._fail(exc)
        else:
            self._complaint = ""

    def close(self) -> None:
        """Remove the file: its process ends."""
        if os.getpid() != self._identity.pid:
            return
        self._drop()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _open(self) -> None:
        self._drop()
        make_directory(self._path.parent)
        remove_dead_rings(self._path.parent)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._lay_out(self._fd)

    def _lay_out(self, fd: int) -> None:
        os.ftruncate(fd, RING_BYTES)
        os.pwrite(fd, encode_ring_header(self._header), 0)

    def _drop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _fail(self, exc: OSError) -> None:
        self._drop()
        if not self._complaint:
            logger.warning("step records are off path=%s error=%s", self._path, exc)
        self._complaint = str(exc)


def remove_dead_rings(directory: Path) -> None:
    """Remove the rings of processes that are gone."""
    for path in directory.glob(RING_GLOB):
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                header = decode_ring_header(file.read(RING_HEADER_BYTES))
            if header is not None and is_known_dead(Identity(header.pid, header.start_ticks, header.pid_namespace)):
                path.unlink()
