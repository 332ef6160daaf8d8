"""Opens files of a gate's folder, in which anybody who may write there can leave anything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OWNER_READS = 0o644


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file. A pipe, device, folder or symbolic link is refused, and none of them blocks.

    Nothing is cut at the opening (``O_TRUNC`` is left out of ``flags``): whose file it is, is known only afterwards.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, OWNER_READS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file, remove it", str(path))
    return fd
