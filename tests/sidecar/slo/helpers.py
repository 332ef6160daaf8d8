"""Requests with raw latencies, and the pages and intervals that a server would make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from sidecar.source.snapshot import EngineSnapshot, Histogram

EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, math.inf)


class Request(NamedTuple):
    """One request: it is in the engine from ``arrival_s`` on, decodes at an even pace, and ends."""

    arrival_s: float
    ttft_s: float
    decode_s: float
    num_tokens: int
    aborted: bool = False
    """Given up while it decodes: vLLM does not count it as finished."""

    @property
    def first_token_s(self) -> float:
        return self.arrival_s + self.ttft_s

    @property
    def end_s(self) -> float:
        return self.first_token_s + (self.decode_s if self.num_tokens > 1 else 0.0)

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def latencies_s(self) -> tuple[float, float, float]:
        return self.ttft_s, self.tpot_s, self.end_s - self.arrival_s


# Times on a grid of binary fractions: their sums and differences are exact.
TICKS = st.integers(0, 64 * 20).map(lambda ticks: ticks / 64)
REQUESTS = st.lists(
    st.builds(
        Request,
        arrival_s=TICKS,
        ttft_s=st.integers(0, 128).map(lambda ticks: ticks / 64),
        decode_s=st.integers(0, 256).map(lambda ticks: ticks / 64),
        num_tokens=st.integers(1, 9),
        aborted=st.booleans(),
    ),
    max_size=40,
)


def histogram(values: Sequence[float], edges: tuple[float, ...] = EDGES) -> Histogram:
    cumulative = tuple(float(sum(value <= edge for value in values)) for edge in edges)
    return Histogram(edges=edges, cumulative=cumulative, total=math.fsum(values))


def page_at(requests: Sequence[Request], t_s: float, edges: tuple[float, ...] = EDGES) -> EngineSnapshot:
    """What the server exports at ``t_s``, up to and including that moment."""
    began = [request for request in requests if request.first_token_s <= t_s]
    finished = [request for request in began if request.end_s <= t_s and not request.aborted]
    gaps = [request.tpot_s for request in finished for _ in range(request.num_tokens - 1)]
    return EngineSnapshot(
        t_s=t_s,
        monotonic_s=t_s,
        running=float(sum(request.arrival_s <= t_s < request.end_s for request in requests)),
        waiting=0.0,
        finished=float(len(finished)),
        ttft=histogram([request.ttft_s for request in began], edges),
        itl=histogram(gaps, edges),
        tpot=histogram([request.tpot_s for request in finished], edges),
        e2e=histogram([request.end_s - request.arrival_s for request in finished], edges),
    )
