"""Which process this is, whether another one still lives, and which directory a server's gate is in."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "WADILOCO_GATE_DIR"
SWITCHED_OFF = "off"
DEFAULT_PORT = 8000
"""vLLM's."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, told apart from a later one with the same id."""

    pid: int
    start_ticks: int
    """0 where the platform does not say."""
    pid_namespace: int
    """0 where the platform has none."""


def own_identity() -> Identity:
    pid = os.getpid()
    return Identity(pid, _start_ticks(pid) or 0, _own_namespace())


def is_known_dead(identity: Identity) -> bool:
    """Whether that process certainly is gone; False where this process cannot tell."""
    return not is_foreign(identity) and _start_ticks(identity.pid) != identity.start_ticks


def is_foreign(identity: Identity) -> bool:
    """Whether this process cannot tell if that one lives: it is in another container, or the platform does not say."""
    return identity.pid <= 0 or identity.start_ticks == 0 or identity.pid_namespace != _own_namespace()


def gate_directory(argv: Sequence[str] = ()) -> Path | None:
    """Where a server with this command line keeps its gate; None when it is switched off."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen == SWITCHED_OFF:
        return None
    return Path(chosen) if chosen else default_directory(_port_of(argv))


def default_directory(port: int) -> Path:
    """One folder per user and server port, in memory where the platform has such a place."""
    shared_memory = Path("/dev/shm")  # noqa: S108 (the owner of the folder below is checked)
    root = shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
    return root / f"wadiloco-{os.getuid()}" / str(port)


def make_directory(path: Path) -> None:
    """Make the folder.

    Raises:
        OSError: it cannot be made, or its parent is somebody else's although it carries this user's name.
    """
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    parent = path.parent
    if parent.name == f"wadiloco-{os.getuid()}" and (parent.is_symlink() or parent.stat().st_uid != os.getuid()):
        raise PermissionError(f"{parent} belongs to another user")


def _port_of(argv: Sequence[str]) -> int:
    for position, argument in enumerate(argv):
        name, separator, value = argument.partition("=")
        if name == "--port":
            text = value if separator else next(iter(argv[position + 1 :]), "")
            return int(text) if text.isdigit() else DEFAULT_PORT
    return DEFAULT_PORT


def _start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; None when there is no such process, or it is a zombie."""
    if sys.platform != "linux":
        return None
    try:
        # The command, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _own_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino & 0xFFFFFFFF
    except OSError:
        return 0
