"""Writes the ring of step records of one engine; like the gate's writer it never raises and never blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .files import open_regular
from .identity import Identity, is_known_dead, make_directory, own_identity
from .log import plugin_logger
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

logger = plugin_logger(__name__)

RING_GLOB = "steps-*.ring"
RING_BYTES = RING_HEADER_BYTES + RECORD_BYTES * RING_CAPACITY


class StepRing:
    """The file ``steps-ENGINE-PID.ring`` of one engine, as one API server sees it.

    Steps come from vLLM's loop, `beat` from the heartbeat's thread. While records cannot be written the ring falls
    silent, so that readers take it for dead rather than idle, and the log has one line for all of it.
    """

    def __init__(self, directory: Path, *, engine: int, max_num_seqs: int = 0) -> None:
        self._identity = own_identity()
        self._path = directory / f"steps-{engine}-{self._identity.pid}.ring"
        self._header = encode_ring_header(
            RingHeader(
                pid=self._identity.pid,
                engine=engine,
                start_ticks=self._identity.start_ticks,
                pid_namespace=self._identity.pid_namespace,
                max_num_seqs=max_num_seqs,
                created_ns=time.monotonic_ns(),
            )
        )
        self._written = 0
        self._unwritten: tuple[int, Sequence[bytes]] | None = None
        """What failed last: its first sequence number, and the records."""
        self._failed_at = 0
        self._complaint = ""
        """Why steps are or were lost; empty again once a whole ring of records followed."""
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._closed = False
        self.beat()

    @property
    def next_sequence(self) -> int:
        return self._written + 1

    def write(self, records: Sequence[bytes]) -> None:
        """Write records from `next_sequence` on; all but the last must be full, so that they follow one another."""
        if os.getpid() != self._identity.pid:
            return  # a forked child: the ring is its parent's
        with self._lock:
            if self._fd is not None:
                self._put(self._fd, self._written + 1, records)
            self._written += len(records)

    def beat(self) -> None:
        """Prove life, once the last records are in the file; make or mend the file if it is not what it was."""
        if os.getpid() != self._identity.pid or self._closed:
            return
        if self._fd is None:
            remove_dead_rings(self._path.parent)
        with self._lock:
            try:
                if self._fd is not None and not self._is_in_place(self._fd):
                    self._drop()
                if self._fd is None:
                    self._fd = self._open()
                self._mend(self._fd)
                if self._unwritten is not None:
                    self._put(self._fd, *self._unwritten)
                if self._unwritten is None:
                    os.pwrite(self._fd, encode_pulse(time.monotonic_ns(), self._written), PULSE_OFFSET)
            except OSError as exc:
                self._drop()
                self._fail(exc)

    def close(self) -> None:
        """Remove the file: its process ends."""
        if os.getpid() != self._identity.pid:
            return
        with self._lock:
            self._closed = True
            if self._fd is None:
                return
            with contextlib.suppress(OSError):
                if self._is_in_place(self._fd):
                    self._path.unlink()
            self._drop()

    def _put(self, fd: int, first: int, records: Sequence[bytes]) -> None:
        until_end = RING_CAPACITY - (first - 1) % RING_CAPACITY
        try:
            write_whole(fd, b"".join(records[:until_end]), record_offset(first))
            if len(records) > until_end:
                write_whole(fd, b"".join(records[until_end:]), record_offset(first + until_end))
        except OSError as exc:
            self._unwritten = first, records
            self._fail(exc)
        else:
            self._unwritten = None
            if self._complaint and first - self._failed_at >= RING_CAPACITY:
                self._complaint = ""

    def _is_in_place(self, fd: int) -> bool:
        """Whether the path still leads to this file."""
        try:
            there = os.stat(self._path, follow_symlinks=False)  # noqa: PTH116 (five times a second, within vLLM)
        except FileNotFoundError:
            return False
        here = os.fstat(fd)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _open(self) -> int:
        make_directory(self._path.parent)
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            if os.pread(fd, len(self._header), 0) != self._header:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _mend(self, fd: int) -> None:
        """Lay the file out, unless it is; what records are in it stay, and what was lost tells by its checksums."""
        if os.fstat(fd).st_size < RING_BYTES:
            os.ftruncate(fd, RING_BYTES)
        if os.pread(fd, len(self._header), 0) != self._header:
            write_whole(fd, self._header, 0)

    def _drop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _fail(self, exc: OSError) -> None:
        if not self._complaint:
            logger.warning("step records are off path=%s error=%s", self._path, exc)
        self._complaint = str(exc)
        self._failed_at = self._written


def write_whole(fd: int, data: bytes, offset: int) -> None:
    """Raises:
    OSError: it cannot be written, or a part of it only.
    """
    if os.pwrite(fd, data, offset) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove_dead_rings(directory: Path) -> None:
    """Remove the rings of processes that are gone; what is no ring stays."""
    with contextlib.suppress(OSError):
        for path in directory.glob(RING_GLOB):
            with contextlib.suppress(OSError):
                fd = open_regular(path, os.O_RDONLY)
                try:
                    header = decode_ring_header(os.pread(fd, RING_HEADER_BYTES, 0))
                finally:
                    os.close(fd)
                if header is not None and is_known_dead(Identity(header.pid, header.start_ticks, header.pid_namespace)):
                    path.unlink()
