"""The last ten minutes of each server, in bins (pure).

One ring of floats per server, whatever the rate of its samples: 60 bins of 6 numbers of 4 bytes. A number that nobody
told is NaN in the ring and None outside it. Counts are only added up over the bins that told them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass

from controller.dashboard.schema import LoadBin
from sidecar.schema import LoadSample

BIN_S = 10.0
NUM_BINS = 60

_IN_ENGINE_SUM, _IN_ENGINE_NUM, _ARRIVALS, _INTERVAL_S, _REQUESTS, _VIOLATIONS = range(6)
_WIDTH = 6
_EMPTY_BIN = array("f", [math.nan] * _WIDTH)


@dataclass(frozen=True, slots=True)
class SloCount:
    """Requests judged, and those of them that certainly missed the SLO."""

    requests: float
    violations: float


class _Ring:
    """The bins of one server, by number modulo their count."""

    __slots__ = ("last", "values")

    def __init__(self, number: int) -> None:
        self.last = number
        self.values = _EMPTY_BIN * NUM_BINS

    def open(self, number: int) -> int | None:
        """Where the bin begins; None when it is too old to be kept."""
        if number <= self.last - NUM_BINS:
            return None
        for skipped in range(max(self.last + 1, number - NUM_BINS + 1), number + 1):
            at = skipped % NUM_BINS * _WIDTH
            self.values[at : at + _WIDTH] = _EMPTY_BIN
        self.last = max(self.last, number)
        return number % NUM_BINS * _WIDTH

    def add(self, at: int, first: float, second: float) -> None:
        """Two numbers that are always told together, one after the other."""
        values = self.values
        was = values[at]
        if was == was:  # NaN is what differs from itself
            values[at] = was + first
            values[at + 1] += second
        else:
            values[at], values[at + 1] = first, second

    def numbers(self) -> range:
        return range(self.last - NUM_BINS + 1, self.last + 1)

    def read(self, number: int, what: int) -> float | None:
        value = self.values[number % NUM_BINS * _WIDTH + what]
        return None if math.isnan(value) else value


class LoadHistory:
    """Bins of every server that sends samples."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}

    def add(self, sample: LoadSample) -> None:
        number = int(sample.t_s // BIN_S)
        ring = self._rings.get(sample.server_id)
        if ring is None:
            ring = self._rings[sample.server_id] = _Ring(number)
        at = number % NUM_BINS * _WIDTH if number == ring.last else ring.open(number)
        if at is None:
            return
        told = sample.__dict__  # a large fleet sends ten thousand per second
        running, waiting, arrivals, interval_s = told["running"], told["waiting"], told["arrivals"], told["interval_s"]
        requests, violations = told["slo_requests"], told["slo_violations"]
        if running is not None and waiting is not None:
            ring.add(at + _IN_ENGINE_SUM, running + waiting, 1.0)
        if arrivals is not None and interval_s is not None:
            ring.add(at + _ARRIVALS, arrivals, interval_s)
        if requests is not None and violations is not None:
            ring.add(at + _REQUESTS, requests, violations)

    def keep_only(self, server_ids: Collection[str]) -> None:
        """Forget the servers that have left the fleet."""
        if len(self._rings) > len(server_ids):
            self._rings = {name: ring for name, ring in self._rings.items() if name in server_ids}

    def bins(self, server_id: str) -> list[LoadBin]:
        ring = self._rings.get(server_id)
        if ring is None:
            return []
        bins = [_to_bin(ring, number) for number in ring.numbers()]
        return [b for b in bins if b.in_engine is not None or b.arrivals_per_s is not None or b.requests is not None]

    def slo(self, server_id: str, *, since_s: float) -> SloCount | None:
        """Over the bins that end after ``since_s``; None when none of them told."""
        ring = self._rings.get(server_id)
        if ring is None:
            return None
        requests = violations = 0.0
        is_told = False
        # Twice per row and tick: an array is read directly, and NaN is what differs from itself.
        for number in range(max(int(since_s // BIN_S), ring.last - NUM_BINS + 1), ring.last + 1):
            at = number % NUM_BINS * _WIDTH
            judged = ring.values[at + _REQUESTS]
            if judged == judged:
                is_told = True
                requests += judged
                violations += ring.values[at + _VIOLATIONS]
        return SloCount(requests=requests, violations=violations) if is_told else None


def _to_bin(ring: _Ring, number: int) -> LoadBin:
    told, interval_s = ring.read(number, _IN_ENGINE_NUM), ring.read(number, _INTERVAL_S)
    return LoadBin(
        t_s=(number + 1) * BIN_S,
        in_engine=None if told is None else (ring.read(number, _IN_ENGINE_SUM) or 0.0) / told,
        arrivals_per_s=None if interval_s is None else (ring.read(number, _ARRIVALS) or 0.0) / interval_s,
        requests=ring.read(number, _REQUESTS),
        violations=ring.read(number, _VIOLATIONS),
    )
