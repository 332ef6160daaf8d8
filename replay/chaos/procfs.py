"""Processes of this machine as Linux tells of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PROC = Path("/proc")
END_WAIT_S = 10.0


def adopt_orphans() -> None:
    """Descendants whose parents end become children of this process, so that none gets out of sight."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def parent_of(pid: int) -> int | None:
    """None when there is no such process (any more), or it has ended and nobody has asked for its end yet."""
    try:
        state, parent = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(parent)


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process is another one, or descends from it."""
    at: int | None = pid
    while at is not None and at > 1:
        if at == ancestor:
            return True
        at = parent_of(at)
    return False


def descendants(ancestor: int) -> list[int]:
    """All processes below one, that one excluded."""
    parents = {pid: parent_of(pid) for pid in (int(path.name) for path in PROC.iterdir() if path.name.isdecimal())}
    found, generation = [], {ancestor}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation and pid != ancestor}
        found += sorted(generation)
    return found


def resident_mb(pid: int) -> float | None:
    """Memory that a process has in RAM, in MiB; None when it is gone."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # One that has ended and that nobody has asked for has no pages left.
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20) if pages else None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; whether there was a process to take it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def end_descendants(ancestor: int) -> int:
    """SIGKILL all below a process and wait until they are gone; how many there were."""
    num_ended, due_s = 0, time.monotonic() + END_WAIT_S
    while (left := descendants(ancestor)) and time.monotonic() < due_s:
        num_ended = max(num_ended, len(left))
        for pid in left:
            send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.02)
    return num_ended
