"""A server with fixed latencies, for simulations (pure).

A request takes

    TTFT = first token        ITL = TPOT = per token        e2e = TTFT + (output tokens - 1) · ITL

and ``sync_slowdown`` times as long, all of it, when its time alone overlaps a sync. Requests do not slow each other
down: what a policy gains or loses then comes from the arrivals that it lets meet a sync, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sidecar.slo import Slo, SloMetric

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Windows = Sequence[tuple[float, float]]
"""Start and end of each sync, in order, apart from each other."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    first_token_s: float
    per_token_s: float
    sync_slowdown: float


@dataclass(frozen=True, slots=True)
class Service:
    """The requests of a slice as one fleet serves them, in order of arrival."""

    arrival_s: Floats  # [N]
    ttft_s: Floats  # [N]
    itl_s: Floats  # [N]
    e2e_s: Floats  # [N]
    slow: float
    violates_alone: Flags  # [N]
    violates_in_sync: Flags  # [N]

    @property
    def end_s(self) -> Floats:
        """Without syncs."""
        return self.arrival_s + self.e2e_s

    def in_sync(self, windows: Windows) -> Flags:
        """Which requests meet a sync."""
        if not windows:
            return np.zeros(self.arrival_s.size, dtype=bool)
        starts_s, ends_s = np.array(windows, dtype=float).T
        # Of the windows that begin before a request ends the last one is the only one that can still reach it.
        last = np.searchsorted(starts_s, self.end_s, side="left") - 1
        met: Flags = (last >= 0) & (ends_s[np.maximum(last, 0)] > self.arrival_s)
        return met

    def violated(self, windows: Windows) -> Flags:
        return np.where(self.in_sync(windows), self.violates_in_sync, self.violates_alone)

    def part(self, chosen: Flags | slice) -> Service:
        return Service(
            self.arrival_s[chosen],
            self.ttft_s[chosen],
            self.itl_s[chosen],
            self.e2e_s[chosen],
            self.slow,
            self.violates_alone[chosen],
            self.violates_in_sync[chosen],
        )

    def after(self, start_s: float) -> Service:
        """Counted from a later moment; requests that arrived before it are left out."""
        kept = self.part(self.arrival_s >= start_s)
        return replace(kept, arrival_s=kept.arrival_s - start_s)


def serve(arrival_s: Floats, output_tokens: NDArray[np.int64], *, model: ServiceModel, slo: Slo) -> Service:
    """What becomes of requests that arrive then, sorted, and get so many tokens."""
    ttft_s = np.full(arrival_s.size, model.first_token_s)
    itl_s = np.full(arrival_s.size, model.per_token_s)
    e2e_s = ttft_s + (output_tokens - 1) * itl_s
    latencies_s = {SloMetric.TTFT: ttft_s, SloMetric.ITL: itl_s, SloMetric.TPOT: itl_s, SloMetric.E2E: e2e_s}

    def violates(slow: float) -> Flags:
        missed = [slow * latencies_s[objective.metric] > objective.threshold_s for objective in slo.objectives]
        any_missed: Flags = np.logical_or.reduce(missed)
        return any_missed

    return Service(arrival_s, ttft_s, itl_s, e2e_s, model.sync_slowdown, violates(1.0), violates(model.sync_slowdown))


def cost_of_starts(service: Service, starts_s: Floats, *, sync_s: float) -> NDArray[np.int64]:
    """Violations that a single sync from each start time adds."""
    harmed = service.part(service.violates_in_sync & ~service.violates_alone)
    ends_s = np.sort(harmed.end_s)
    begun = np.searchsorted(harmed.arrival_s, starts_s + sync_s, side="left")
    over = np.searchsorted(ends_s, starts_s, side="right")
    return begun - over
