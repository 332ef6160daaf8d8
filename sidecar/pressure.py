"""How loaded the server is now and within the next seconds (pure).

    pressure = max( sat((running + waiting) / busy_requests), sat(expected / busy_requests), KV usage )

with ``expected`` the forecast's 90 % quantile of requests in the engine, the largest up to `LOOKAHEAD_S` ahead. Load
that is unknown (the engine is not READY, or its gauges are missing) has no pressure: None, which readers count as
full. KV usage joins when it is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.schema import EngineState, ForecastPoint
from sidecar.source.snapshot import EngineSnapshot

# A sync of a small model takes about this long: what arrives within it meets the sync.
LOOKAHEAD_S = 5.0


def pressure(
    state: EngineState,
    snapshot: EngineSnapshot | None,
    *,
    forecast: Iterable[ForecastPoint],
    busy_requests: int,
) -> float | None:
    """Pressure in 0..1, or None when the load is unknown."""
    if state is not EngineState.READY or snapshot is None or snapshot.in_engine is None:
        return None
    expected = [p.running_q90 for p in forecast if p.horizon_s <= LOOKAHEAD_S and p.running_q90 is not None]
    return max(
        min(max([snapshot.in_engine, *expected]) / busy_requests, 1.0),
        snapshot.kv_usage_max_frac or 0.0,
    )
