"""Traces of LLM traffic: when requests arrive, and how many tokens go in and out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    """Seconds after the first request."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    format: str
    requests: tuple[Request, ...]
    """In order of arrival; never empty."""
    num_skipped: int = 0
    """Rows left out because the recorded request had failed."""

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s


@dataclass(frozen=True, slots=True)
class Burstiness:
    """How uneven the arrivals are, counted in seconds."""

    num_requests: int
    mean_rate_per_s: float
    peak_rate_per_s: float
    variance_to_mean: float
    """Of the counts per second: 1 for a Poisson process."""
    empty_frac: float
    """Share of the seconds without an arrival."""


def read_trace(path: Path, format: str = "auto") -> Trace:  # noqa: A002
    raise NotImplementedError


def slice_trace(
    trace: Trace, *, rate_scale: float = 1.0, start_s: float = 0.0, duration_s: float | None = None
) -> Trace:
    raise NotImplementedError


def burstiness(trace: Trace, *, duration_s: float | None = None) -> Burstiness:
    raise NotImplementedError
