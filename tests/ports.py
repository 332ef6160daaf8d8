"""Ports for tests that cannot let the system choose."""

from __future__ import annotations

import os

SHARES = 4
"""Into which a range is cut: processes that run tests side by side (pytest -n) must not choose the same port."""


def share_of(ports: range) -> range:
    """The part of the range that this process may choose from."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    size = len(ports) // SHARES
    first = ports.start + int(worker) % SHARES * size
    return range(first, first + size)
