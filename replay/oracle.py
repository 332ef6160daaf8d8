"""The best schedule in hindsight, by dynamic programming (pure).

With c_t the violations that a sync from second t adds, N syncs and a gap of g seconds between starts,

    best(k, t) = min(best(k, t - 1),  c_t + best(k - 1, t - g))

is the least total of k syncs that start until t. It takes N · T steps. Syncs that are g apart must not meet the same
requests, or those would count twice: g is at least a sync and the longest request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_starts(costs: Sequence[float], *, num_syncs: int, gap: int) -> tuple[int, ...]:
    """Indices of ``num_syncs`` starts at least ``gap`` apart of least total cost; fewer where they do not fit."""
    values = np.asarray(costs, dtype=float)
    size = values.size
    num_syncs = min(num_syncs, 0 if size == 0 else 1 + (size - 1) // max(gap, 1))
    best = np.zeros(size + 1)  # best[t]: least total of k syncs that start before t
    chosen = []
    for number in range(num_syncs):
        reach = np.arange(size) - gap + 1
        before = np.zeros(size) if number == 0 else np.where(reach >= 0, best[np.maximum(reach, 0)], np.inf)
        totals = np.concatenate(([np.inf], values + before))
        best = np.minimum.accumulate(totals)
        chosen.append(_where_reached(totals))
    found: list[int] = []
    until = size
    for index in reversed(chosen):
        found.append(int(index[until]) - 1)
        until = max(found[-1] - gap + 1, 0)
    return tuple(reversed(found))


def _where_reached(totals: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each prefix the first place of its minimum."""
    is_new = np.concatenate(([True], totals[1:] < np.minimum.accumulate(totals)[:-1]))
    return np.maximum.accumulate(np.where(is_new, np.arange(totals.size), 0))
