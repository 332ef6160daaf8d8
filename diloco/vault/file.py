"""A vault as a file that is mapped: made by the agent, written by the worker, read by both and by the next worker.

The file has a name, and a lock for as long as its agent lives: an agent that was killed and is started again takes
over what it finds (`adopt`), and nobody takes it from a living one. Shared memory (``/dev/shm``) survives processes and
not the host. Its pages are allocated when it is made, so that a full memory is found out then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from diloco.vault.errors import CorruptError, VaultError, VaultFullError
from diloco.vault.layout import (
    FLAGS,
    FLAGS_OFFSET,
    NUM_RECORDS,
    SEQUENCE,
    SEQUENCE_OFFSET,
    UNSURE,
    Generation,
    Layout,
    Part,
    ReadRecord,
    RegionNeed,
    check_places,
    choose_regions,
    decode_record,
    encode_record,
)

CHUNK_BYTES = 1 << 20
"""What is copied and digested at once: the digest then finds it in the cache."""
PRIVATE = 0o600
FLAGS_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class VaultFile:
    """A mapped vault. Use `create`, `open` or `adopt`. One writer at a time; readers check digests."""

    def __init__(self, path: Path, descriptor: int, layout: Layout, *, is_owner: bool) -> None:
        self.path = path
        self.layout = layout
        self._descriptor: int | None = descriptor
        self._is_owner = is_owner
        self._map = mmap.mmap(descriptor, layout.num_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, needs: Sequence[RegionNeed], *, record_bytes: int) -> Self:
        """Make a vault, and its folder, and hold its lock; one of a dead agent in its place is gone then.

        Raises:
            VaultFullError: no room for it there.
            VaultError: somebody else holds it, or it cannot be made.
        """
        layout = Layout.of(needs, record_bytes=record_bytes)
        remove_dead(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, FLAGS_OPEN | os.O_CREAT | os.O_EXCL, PRIVATE)
        except OSError as exc:
            raise VaultError(f"cannot make {path}: {exc.strerror}", field="vault_dir") from exc
        try:
            _lock(descriptor, path)
            os.posix_fallocate(descriptor, 0, layout.num_bytes)
            os.pwrite(descriptor, layout.encode(), 0)
            return cls(path, descriptor, layout, is_owner=True)
        except OSError as exc:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)
            raise _no_room(path, layout, exc) from exc
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: Path, *, write_within_s: float | None = None) -> Self:
        """Map a vault that somebody else owns: to read it, or as its one writer, with so much time to become that.

        Raises:
            CorruptError: it is none.
            VaultError: it is not there, or somebody else writes to it.
        """
        vault = cls._open(path, is_owner=False)
        if write_within_s is not None:
            try:
                vault._become_writer(write_within_s)
            except BaseException:
                vault.close()
                raise
        return vault

    @classmethod
    def adopt(cls, path: Path) -> Self:
        """Take over the vault of a dead agent.

        Raises:
            CorruptError: it is none.
            VaultError: it is not there, or its agent lives.
        """
        return cls._open(path, is_owner=True)

    @classmethod
    def _open(cls, path: Path, *, is_owner: bool) -> Self:
        try:
            descriptor = os.open(path, FLAGS_OPEN)
        except OSError as exc:
            raise VaultError(f"cannot open {path}: {exc.strerror}", field="vault") from exc
        try:
            if is_owner:
                _lock(descriptor, path)
            size = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else contextlib.nullcontext(b"") as data:
                layout = Layout.decode(memoryview(data)[:_MAX_HEADER].tobytes(), file_bytes=size)
            return cls(path, descriptor, layout, is_owner=is_owner)
        except (OSError, ValueError) as exc:
            os.close(descriptor)
            raise VaultError(f"cannot map {path}: {exc}", field="vault") from exc
        except BaseException:
            os.close(descriptor)
            raise

    def _become_writer(self, within_s: float) -> None:
        """A worker whose agent was killed writes on for a moment. The kernel takes the lock of one that dies."""
        if not hasattr(fcntl, "F_OFD_SETLK"):  # not on Linux
            return
        assert self._descriptor is not None
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _WRITER_LOCK)
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EACCES):
                    return  # a file system without such locks
                if time.monotonic() >= deadline_s:
                    raise VaultError(f"somebody else writes to {self.path}", field="vault") from exc
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, remove: bool = False) -> None:
        """Unmap it, and remove it if that is wanted. Views of it that are still in use keep the memory."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        os.close(descriptor)

    def flush(self) -> None:
        """See that it is on the disk, where it lies on one."""
        assert self._descriptor is not None
        self._map.flush()
        os.fsync(self._descriptor)

    # What is in it

    def records(self) -> list[ReadRecord | CorruptError | None]:
        """Each record, or what is wrong with it; None while it is void."""
        return [self._record(index) for index in range(NUM_RECORDS)]

    def generations(self) -> tuple[Generation, ...]:
        """Those whose record is whole, the newest first. Their parts may be corrupt: see `verify`."""
        found = [record.generation for record in self.records() if isinstance(record, ReadRecord)]
        return tuple(sorted(found, key=lambda generation: -generation.number))

    def newest_number(self) -> int:
        """Number of the newest generation, unverified; 0 where there is none. Costs no more than two reads."""
        return max(self._sequence(index) for index in range(NUM_RECORDS))

    def holds(self, generation: Generation) -> bool:
        """Whether it has not been given up: what was read of it until now is what it says."""
        return any(self._sequence(index) == generation.number for index in range(NUM_RECORDS))

    def view(self, part: Part) -> memoryview:
        """The bytes of a part, where they are."""
        region = self.layout.regions[part.region]
        return self._view[region.offset : region.offset + part.length]

    def chunks(self, part: Part) -> Iterator[memoryview]:
        """The same in pieces."""
        view = self.view(part)
        for start in range(0, part.length, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]

    def verify(self, generation: Generation) -> None:
        """Raises `CorruptError`: a part is not what was committed."""
        for part in generation.parts:
            digest = xxhash.xxh3_128()
            for chunk in self.chunks(part):
                digest.update(chunk)
            if digest.hexdigest() != part.digest:
                raise CorruptError(
                    f"part {part.name} of generation {generation.number} does not match its digest", field="vault"
                )

    # Writing

    def begin(self, *, keep: int | None) -> None:
        """Give up every generation but ``keep`` (None: all), to write the next one in their place."""
        for index in range(NUM_RECORDS):
            sequence = self._sequence(index)
            if sequence and sequence != keep:
                self._put(index, SEQUENCE_OFFSET, SEQUENCE.pack(0))

    def reserve(self, lengths: Sequence[int], *, kept: Sequence[Part]) -> list[int]:
        """Regions for new parts of these lengths, beside what the kept generation and ``kept`` parts lie in.

        Raises:
            VaultFullError: there are too few.
        """
        taken = {part.region for part in kept}
        for generation in self.generations():
            taken |= {part.region for part in generation.parts}
        return choose_regions(self.layout, lengths, taken=taken)

    def region(self, index: int) -> memoryview:
        """A reserved region, to be written."""
        region = self.layout.regions[index]
        return self._view[region.offset : region.offset + region.num_bytes]

    def commit(self, generation: Generation) -> None:
        """Make a generation valid whose parts have been written; it takes the record that is void.

        Raises:
            VaultFullError: its record is too long.
            CorruptError: it names regions that there are not.
        """
        check_places(generation, self.layout)
        record = encode_record(generation, record_bytes=self.layout.record_bytes)
        void = [index for index in range(NUM_RECORDS) if not self._sequence(index)]
        if not void:
            raise VaultError("no record is void: begin first", field="vault")
        self._put(void[0], SEQUENCE_OFFSET, SEQUENCE.pack(0))
        self._put(void[0], 0, record[:SEQUENCE_OFFSET])
        self._put(void[0], FLAGS_OFFSET, record[FLAGS_OFFSET:])
        self._put(void[0], SEQUENCE_OFFSET, record[SEQUENCE_OFFSET:FLAGS_OFFSET])

    def mark_unsure(self) -> None:
        """A contribution is pushed that no generation will know of."""
        for index in range(NUM_RECORDS):
            if self._sequence(index):
                self._put(index, FLAGS_OFFSET, FLAGS.pack(UNSURE))

    def _record(self, index: int) -> ReadRecord | CorruptError | None:
        offset = self.layout.record_offset(index)
        try:
            return decode_record(self._view[offset : offset + self.layout.record_bytes], self.layout)
        except CorruptError as exc:
            return exc

    def _sequence(self, index: int) -> int:
        sequence: int = SEQUENCE.unpack_from(self._view, self.layout.record_offset(index) + SEQUENCE_OFFSET)[0]
        return sequence

    def _put(self, index: int, at: int, data: bytes) -> None:
        offset = self.layout.record_offset(index) + at
        self._view[offset : offset + len(data)] = data


def copy_into(
    region: memoryview, pieces: Sequence[bytes | memoryview], *, pause: Callable[[], None] = lambda: None
) -> Part:
    """Fill a region with pieces one after another; returns length and digest, as a part without name and region."""
    digest, at = xxhash.xxh3_128(), 0
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            region[at : at + len(chunk)] = chunk
            # From where it was copied to: what is digested is what will be read.
            digest.update(region[at : at + len(chunk)])
            at += len(chunk)
            pause()
    return Part(name="", region=0, length=at, digest=digest.hexdigest())


_MAX_HEADER = 1 << 21
_LOCK_POLL_S = 0.02
_WRITER_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""struct flock: the whole file."""


def remove_dead(path: Path) -> None:
    """Remove a vault whose agent is gone, if there is one.

    Raises:
        VaultError: its agent lives, or it cannot be removed.
    """
    try:
        descriptor = os.open(path, FLAGS_OPEN)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise VaultError(f"cannot open {path}: {exc.strerror}", field="vault_dir") from exc
    try:
        _lock(descriptor, path)
        # Another one in its place, rather than the same made anew: an orphaned worker may still write to it.
        path.unlink()
    except OSError as exc:
        raise VaultError(f"cannot remove {path}: {exc.strerror}", field="vault_dir") from exc
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise VaultError(f"{path} belongs to an agent that lives", field="vault") from exc


def _no_room(path: Path, layout: Layout, exc: OSError) -> VaultError:
    if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        return VaultError(f"cannot make {path}: {exc.strerror}", field="vault_dir")
    return VaultFullError(
        f"{layout.num_bytes / 1e6:.0f} MB for the vault do not fit into {path.parent}",
        field="vault_dir",
        remedy="give the container a larger /dev/shm (docker: --shm-size), or another --vault-dir, or --no-vault",
    )
