"""Series for the forecast bench: arrivals in bins of one second."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replay.make_trace import make_requests
from replay.traces import read_trace

Series = NDArray[np.float64]

DURATION_S = 3600
AZURE_FILE = "AzureLLMInferenceTrace_code.csv"
# The clone's neighbour; the bench runs without it.
SHARED = Path(__file__).parents[3] / "shared" / "traces" / AZURE_FILE


def bins(arrivals_s: list[float], duration_s: int) -> Series:
    return np.bincount(np.array(arrivals_s).astype(int), minlength=duration_s)[:duration_s].astype(float)


def azure_path() -> Path:
    """Where the Azure code trace is, or would be (``WADILOCO_AZURE_TRACE`` names it)."""
    return Path(os.environ.get("WADILOCO_AZURE_TRACE", SHARED))


def azure() -> Series | None:
    """The Azure code trace, where there is one."""
    path = azure_path()
    if not path.is_file():
        return None
    trace = read_trace(path)
    arrivals_s = [request.arrival_s for request in trace.requests]
    return bins(arrivals_s, int(arrivals_s[-1]) + 1)


def on_off(seed: int) -> Series:
    """The process of the project's own trace, an hour of it."""
    return bins([r.arrival_s for r in make_requests(seed, duration_s=float(DURATION_S))], DURATION_S)


def drifting(seed: int) -> Series:
    """Poisson counts whose rate, about 6/s, follows a slow walk: a few tens of percent in an hour."""
    rng = np.random.default_rng(seed)
    walk, counts = 0.0, []
    for _ in range(DURATION_S):
        walk = 0.9998 * walk + 0.005 * rng.normal()
        counts.append(float(rng.poisson(6.0 * math.exp(walk))))
    return np.array(counts)


SEASON_S = 45


def seasonal(seed: int) -> Series:
    """Poisson counts with a season of `SEASON_S`."""
    rng = np.random.default_rng(seed)
    rates = [max(0.0, 10 + 8 * math.sin(2 * math.pi * i / SEASON_S)) for i in range(DURATION_S)]
    return rng.poisson(rates).astype(float)
