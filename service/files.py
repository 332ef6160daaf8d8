"""Files that a user names, or that others may write beside ours: read with a bound, replaced whole, never waited for.

A path may be a pipe, a device or a link to one: opening it could block for ever, reading it could fill the memory, and
a rename over it, as root, would take the device away from the machine. Only regular files are read, and only regular
files are replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from service.errors import InputError

NOT_REGULAR = "not a regular file"
UNFINISHED_SUFFIX = ".part"
"""Of a file that is being written; one is left behind only by a process that was killed meanwhile."""
MAX_NAME = 40
"""Characters of the target's name in that of the unfinished file: a long name must leave room for the rest."""
FROM_ALL = 0o666
"""As the umask lets it, like any file that a program creates."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; pipes and devices are refused without waiting for them.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, FROM_ALL)
    try:
        _refuse_special(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_special(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def read_regular(path: Path, *, max_bytes: int | None = None) -> bytes:
    """The content of a regular file, however large it claims to be.

    Raises:
        OSError: it cannot be read, is no regular file, or holds more than ``max_bytes``.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1) or b""
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"over {max_bytes} bytes", str(path))
    return content


def read_input(path: Path, *, max_bytes: int | None, field: str, remedy: str) -> bytes:
    """As `read_regular`, for a file that the setting ``field`` names.

    Raises:
        InputError: names field, path and remedy.
    """
    try:
        return read_regular(path, max_bytes=max_bytes)
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror or exc}", field=field, remedy=remedy) from exc


def check_regular(path: Path) -> None:
    """Whether a regular file is there, or nothing yet; it is not opened.

    Raises:
        OSError: it is a folder, a device, a pipe, or a name that no file can have.
    """
    with contextlib.suppress(FileNotFoundError):
        _refuse_special(path.stat().st_mode, path)


def check_replaceable(path: Path) -> Path:
    """The path, links followed: what is there is a regular file, or nothing yet.

    Raises:
        OSError: it is a folder, a device, a pipe, or a name that no file can have.
    """
    target = Path(os.path.realpath(path))
    check_regular(target)
    return target


def replace_file(path: Path, pieces: Iterable[bytes | memoryview], *, follow_links: bool = False) -> None:
    """Replace a file whole: a new one beside it, synced, renamed over it.

    A link at ``path`` is itself replaced, unless ``follow_links`` says that whoever named it meant its target.

    Raises:
        OSError: it cannot be written, or what is there is no regular file; the old file is untouched.
    """
    if follow_links or not path.is_symlink():
        path = check_replaceable(path)
    beside = path.with_name(f".{path.name[:MAX_NAME]}.{secrets.token_hex(8)}{UNFINISHED_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = open_regular(beside, flags)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
