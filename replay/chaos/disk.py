"""A small disk for one process, which can be filled."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

from service.errors import UnavailableError

FILL = ".filled-by-chaos"
CHUNK = 1 << 20
COMMAND_DEADLINE_S = 20.0


def check_disks() -> None:
    """Raises `UnavailableError` where no tmpfs can be mounted: no other disk is filled."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise UnavailableError(
            "a full disk is a small tmpfs, and only root mounts one",
            field="kinds",
            remedy="run as root, or leave disk out of kinds",
        )


def mount_disk(directory: Path, size_mb: int) -> None:
    """Put a tmpfs of this size over a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "wadiloco-chaos", str(directory))


def unmount_disk(directory: Path) -> None:
    """Take it away, also from under a process that still holds a file of it."""
    _run("umount", "--lazy", str(directory))


def fill_disk(directory: Path) -> int:
    """Write until nothing more fits; how many bytes that were. The directory must be a `mount_disk`.

    Raises:
        UnavailableError: it is no disk of its own, and others would suffer.
    """
    if not directory.is_mount():
        raise UnavailableError(f"{directory} is no disk of its own", field="kinds", remedy="leave disk out of kinds")
    written = 0
    with (directory / FILL).open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(CHUNK))
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
    return written


def free_disk(directory: Path) -> None:
    """Take back what `fill_disk` wrote."""
    (directory / FILL).unlink(missing_ok=True)


def _run(*command: str) -> None:
    done = subprocess.run(  # noqa: S603 - the command is made here
        command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip()}", field="kinds")
