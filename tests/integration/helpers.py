"""What the integration tests share: the command line, and waiting on conditions with a deadline."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

T = TypeVar("T")

WADILOCO = (sys.executable, "-m", "wadiloco")
POLL_S = 0.05
DEADLINE_S = 90.0
"""On two cores with as much other work, eight processes of a server needed over 30 s for what takes 1 s else."""


def eventually(
    probe: Callable[[], T | None],
    *,
    deadline_s: float = DEADLINE_S,
    what: str = "condition",
    seen: Callable[[], object] | None = None,
) -> T:
    """The first truthy result of ``probe()``; connection errors count as not yet. ``seen`` says what was instead."""
    deadline = time.monotonic() + deadline_s
    error: Exception | None = None
    while time.monotonic() < deadline:
        try:
            result = probe()
        except httpx.HTTPError as exc:
            result, error = None, exc
        if result:
            return result
        time.sleep(POLL_S)
    instead = "" if seen is None else f", but {seen()}"
    raise AssertionError(f"{what} did not come true within {deadline_s:.0f} s{instead} (last error: {error})")


def descendants_of(pid: int) -> set[int]:
    """Process ids below ``pid`` (Linux)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {pid}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
