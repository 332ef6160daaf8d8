"""Sums over a sliding window in constant memory: a ring of bins, each a sixtieth of the window long.

At the time t the window holds the bins ⌊t/b⌋ - 59 to ⌊t/b⌋ of length b: an observation stays for 59 to 60 bins. Adding
costs O(width), reading O(60 width). Time is monotonic and passed in; bins that nobody wrote are gaps, not zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NUM_BINS = 60


class WindowSums(NamedTuple):
    values: tuple[float, ...]
    entered: float
    """Sum of ``entered`` over the chains of observations in the window, the one that it cuts included."""


@dataclass(slots=True)
class Bin:
    index: int
    values: list[float]
    entered: float
    """Of its first observation."""
    begins_chain: bool
    entered_later: float = 0.0
    """Of the chains that begin with a later observation."""


class SlidingSums:
    """Sums of vectors of ``width`` over the last ``window_s`` seconds."""

    def __init__(self, window_s: float, width: int) -> None:
        self.window_s = window_s
        self._bin_s = window_s / NUM_BINS
        self._width = width
        self._bins: list[Bin | None] = [None] * NUM_BINS

    def add(self, values: Sequence[float], *, now_s: float, entered: float = 0.0, begins_chain: bool = False) -> None:
        """Add an observation. ``entered`` is what stood open as it began.

        Observations that follow one another without a gap are a chain: of each chain in the window the first counts.
        """
        index = math.floor(now_s / self._bin_s)
        slot = self._bins[index % NUM_BINS]
        if slot is None or slot.index < index:
            self._bins[index % NUM_BINS] = Bin(index, list(values), entered, begins_chain)
        elif slot.index == index:
            slot.values = [a + b for a, b in zip(slot.values, values, strict=True)]
            slot.entered_later += entered if begins_chain else 0.0

    def read(self, *, now_s: float) -> WindowSums | None:
        """The sums at ``now_s``; None when nothing was observed within the window."""
        newest = math.floor(now_s / self._bin_s)
        bins = [b for b in self._bins if b is not None and newest - NUM_BINS < b.index <= newest]
        if not bins:
            return None
        bins.sort(key=lambda b: b.index)
        oldest, *later = bins
        return WindowSums(
            values=tuple(math.fsum(column) for column in zip(*(b.values for b in bins), strict=True)),
            entered=oldest.entered
            + sum(b.entered_later for b in bins)
            + sum(b.entered for b in later if b.begins_chain),
        )
