"""The last values of a series in order of size: what quantiles and ranks are read from (pure).

One more value costs a binary search and a move of memory, some microseconds for a thousand; nothing is ever sorted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence


class SortedWindow:
    """The last ``size`` values. 16 bytes per value, and 8 more while somebody holds the `ascending` ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sorted = array("d")
        self._ring = array("d")
        self._oldest = 0
        self._shared: Sequence[float] | None = None

    def __len__(self) -> int:
        return len(self._ring)

    def push(self, value: float) -> None:
        if len(self._ring) < self._size:
            self._ring.append(value)
        else:
            del self._sorted[bisect_left(self._sorted, self._ring[self._oldest])]
            self._ring[self._oldest] = value
            self._oldest = (self._oldest + 1) % self._size
        insort(self._sorted, value)
        self._shared = None

    def ascending(self) -> Sequence[float]:
        """As of now: later values do not change it. The same object until the next `push`."""
        if self._shared is None:
            self._shared = memoryview(self._sorted.tobytes()).cast("d")
        return self._shared
