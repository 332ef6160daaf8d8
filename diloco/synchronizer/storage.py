"""Files of the state directory: writes that are atomic and durable, and errors that say what to do about them.

lock                                  held by the one process that owns the directory
generation-<version>.safetensors      parameters and momentum after <version> outer steps; the last two are kept
contribution-<round>-<slot>.safetensors   accepted for the open round
*.part                                being written; removed at start
fragments/<f>-of-<F>                  the same for each fragment of a run that has several
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from service.errors import ConfigError, ConflictError, UnavailableError
from service.files import UNFINISHED_SUFFIX, open_regular, replace_file

PART_SUFFIX = UNFINISHED_SUFFIX
FRAGMENTS = "fragments"
"""Folder of the fragments' folders."""


@contextlib.contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Make the directory ours while the block runs, free of what an earlier owner left half written.

    Raises:
        ConfigError: it cannot be created or written.
        ConflictError: another process has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_regular(directory / "lock", os.O_RDWR | os.O_CREAT), "r+b")
    except OSError as exc:
        raise _unusable(directory, exc) from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConflictError(
                f"{directory} belongs to a running synchronizer",
                field="directory",
                remedy="stop it, or choose another --directory",
            ) from exc
        for folder in (directory, *directory.glob(f"{FRAGMENTS}/*")):
            for leftover in folder.glob(f"*{PART_SUFFIX}"):
                leftover.unlink()
        yield


class Disk:
    """The state directory as something that may fail, and be well again."""

    def __init__(self, directory: Path, *, whole: Disk | None = None) -> None:
        """A folder of a ``whole`` directory fails and is well together with it."""
        self.directory = directory
        self._whole = whole or self
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the last write failed; None when it did not."""
        return self._whole._problem

    @problem.setter
    def problem(self, reason: str | None) -> None:
        self._whole._problem = reason

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Report a failing disk as a state that may pass: the caller keeps what it has and tries again."""
        try:
            yield
        except OSError as exc:
            reason = f"cannot write to {self.directory}: {exc.strerror or exc}"
            # A single file is missing where its upload was discarded meanwhile: that is not the disk.
            if not isinstance(exc, FileNotFoundError) or not self.directory.is_dir():
                self.problem = reason
            raise UnavailableError(
                reason,
                field="directory",
                remedy="free space or repair the disk; nothing accepted is lost and it is tried again",
            ) from exc
        self.problem = None


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Replace the file by these bytes: after a crash it is either as it was or complete."""
    replace_file(path, pieces)
    sync_folder(path.parent)


def publish(part: Path, path: Path) -> None:
    """Give a file that is already on disk its final name, durably."""
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_part(path: Path, *, offset: int, length: int) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(offset)
        return file.read(length)


def _unusable(directory: Path, exc: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to {directory}: {exc.strerror or exc}",
        field="directory",
        remedy="choose a --directory that this user may write to",
    )
