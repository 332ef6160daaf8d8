"""A percentile of non-negative values, online, in fixed memory.

Values are counted in `NUM_BUCKETS` buckets, about 4 % wide each over six orders of magnitude; a count fades by
``discount`` with every later value. The answer is the lower edge of the bucket that the percentile lies in: for small
counts buckets hold one whole number, and the answer is that number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

GROWTH = 1.04
NUM_BUCKETS = 400
BUCKETS_PER_LOG = 1.0 / math.log(GROWTH)
FIRST_EDGE = 0.5
# Weights grow instead of all buckets fading with every value; before a float overflows they are scaled down.
MAX_WEIGHT = 1e12
REFRESH_EVERY = 32
NUM_EAGER = 64


class Percentile:
    """The ``probability`` quantile of what was added; None before the first value."""

    __slots__ = ("_counts", "_discount", "_num_added", "_probability", "_weight", "value")

    def __init__(self, probability: float, *, discount: float) -> None:
        self._probability = probability
        self._discount = discount
        self._counts = [0.0] * NUM_BUCKETS
        self._weight = 1.0
        self._num_added = 0
        self.value: float | None = None

    @property
    def counts(self) -> list[float]:
        """Weight per bucket, the newest value having weight 1."""
        return [count / self._weight for count in self._counts]

    def load(self, counts: Mapping[int, float]) -> None:
        """Take over `counts` that were kept, by bucket."""
        self._counts = [counts.get(bucket, 0.0) for bucket in range(NUM_BUCKETS)]
        self._weight = 1.0
        self.value = None
        self._refresh()

    def add(self, value: float) -> None:
        self._weight /= self._discount
        if self._weight > MAX_WEIGHT:
            self._counts = self.counts
            self._weight = 1.0
        self._counts[bucket_of(value)] += self._weight
        if self._num_added < NUM_EAGER or self._num_added % REFRESH_EVERY == 0:
            self._refresh()
        self._num_added += 1

    def _refresh(self) -> None:
        wanted = self._probability * sum(self._counts)
        seen = 0.0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count > 0 and seen >= wanted:
                self.value = edge_of(bucket)
                return


def bucket_of(value: float) -> int:
    """0 is nothing at all; then one bucket per `GROWTH`."""
    if value < FIRST_EDGE:
        return 0
    return min(1 + int(math.log(value / FIRST_EDGE) * BUCKETS_PER_LOG + 1e-9), NUM_BUCKETS - 1)


def edge_of(bucket: int) -> float:
    """The least value of a bucket."""
    return 0.0 if bucket == 0 else FIRST_EDGE * GROWTH ** (bucket - 1)
