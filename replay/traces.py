"""Traces of LLM traffic: when requests arrive, and how many tokens go in and out.

A slice of a trace keeps its burst shape: ``rate_scale`` X divides the time axis by X, so that the rate becomes X times
as high, then ``[start, start + duration)`` is cut out in replay seconds. A slice that reaches past the end goes on at
the beginning, as if the trace were a ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replay.trace_formats import FORMATS, Row, detect_format, read_lines
from service.errors import InputError

MIN_DURATION_S = 1.0
"""A trace whose requests all arrive at once still needs a length, or a ring of it would hold infinitely many."""
MAX_REQUESTS = 10_000_000
"""A slice beyond this is a slip of the keyboard (it would not fit into memory either)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    """Seconds after the start: the first request of a file, the beginning of a slice."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    format: str
    requests: tuple[Request, ...]
    """In order of arrival; never empty."""
    duration_s: float
    """Length of the time that it covers, silence after the last request included."""
    num_skipped: int = 0
    """Rows left out because the recorded request had failed."""


@dataclass(frozen=True, slots=True)
class Burstiness:
    """How uneven the arrivals are, counted in whole seconds."""

    num_requests: int
    mean_rate_per_s: float
    peak_rate_per_s: float
    variance_to_mean: float
    """Of the counts per second: about 1 for a Poisson process."""
    empty_frac: float
    """Share of the seconds without an arrival."""


def read_trace(path: Path, format: str = "auto") -> Trace:  # noqa: A002
    """Read a trace file line by line; its format is found from its content unless named.

    Raises:
        InputError: names the file, the line and the field at fault.
    """
    source = FORMATS.get(format)
    if source is None:
        if format != "auto":
            raise InputError(
                f"no such format: {format!r}", field="trace format", remedy=f"use auto, {', '.join(FORMATS)}"
            )
        source = detect_format(path)
    requests: list[Request] = []
    num_skipped = 0
    origin_s: float | None = None
    for row in _in_order(path, source.rows(path, read_lines(path))):
        if row.failed:
            num_skipped += 1
            continue
        if origin_s is None:
            origin_s = row.time_s
        requests.append(Request(row.time_s - origin_s, row.input_tokens, row.output_tokens))
    if not requests:
        skipped = f" (all {num_skipped} rows are failed requests)" if num_skipped else ""
        raise InputError(f"holds no request{skipped}", field=str(path), remedy="choose a trace with requests")
    return Trace(path.name, source.name, tuple(requests), _covered_s(requests), num_skipped)


def slice_trace(
    trace: Trace, *, rate_scale: float = 1.0, start_s: float = 0.0, duration_s: float | None = None
) -> Trace:
    """The requests of ``[start_s, start_s + duration_s)`` in replay seconds, counted from ``start_s``.

    Without ``duration_s`` the slice ends where the trace ends.

    Raises:
        InputError: a bad argument, or a slice without requests.
    """
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise InputError(f"must be over 0, got {rate_scale:g}", field="--rate-scale", remedy="1 keeps the rate")
    length_s = trace.duration_s / rate_scale
    if not 0 <= start_s < length_s:
        raise InputError(
            f"{start_s:g} s is outside the trace, which lasts {length_s:g} s at --rate-scale {rate_scale:g}",
            field="--start-s",
            remedy="choose an earlier start, fewer --seeds (each takes the next slice) or a lower --rate-scale",
        )
    wanted_s = length_s - start_s if duration_s is None else duration_s
    if not (math.isfinite(wanted_s) and wanted_s > 0):
        raise InputError(f"must be over 0, got {wanted_s:g}", field="--duration-s", remedy="give some seconds")
    num_laps = math.ceil((start_s + wanted_s) / length_s)
    if num_laps * len(trace.requests) > MAX_REQUESTS:
        raise InputError(
            f"{wanted_s:g} s at --rate-scale {rate_scale:g} holds over {MAX_REQUESTS:,} requests",
            field="--duration-s",
            remedy="shorten it or lower --rate-scale",
        )
    requests = tuple(_cut(trace, rate_scale, start_s, wanted_s, length_s, num_laps))
    if not requests:
        raise InputError(
            f"no request of {trace.name} lies between {start_s:g} s and {start_s + wanted_s:g} s",
            field="--start-s",
            remedy="move --start-s, lengthen --duration-s or raise --rate-scale",
        )
    return Trace(trace.name, trace.format, requests, wanted_s, trace.num_skipped)


def burstiness(trace: Trace) -> Burstiness:
    """Mean, peak and variance of the arrivals per second."""
    arrivals_s = np.fromiter((request.arrival_s for request in trace.requests), dtype=float)
    num_seconds = max(math.ceil(trace.duration_s), int(arrivals_s[-1]) + 1)
    counts = np.bincount(arrivals_s.astype(np.int64), minlength=num_seconds)
    return Burstiness(
        num_requests=len(trace.requests),
        mean_rate_per_s=float(len(trace.requests) / trace.duration_s),
        peak_rate_per_s=float(counts.max()),
        variance_to_mean=float(counts.var() / counts.mean()),
        empty_frac=float((counts == 0).mean()),
    )


def _in_order(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    last_s = -math.inf
    for row in rows:
        if row.time_s < last_s:
            raise InputError(
                f"line {row.line}: arrives {last_s - row.time_s:g} s before the line above it",
                field=str(path),
                remedy="sort the file by its timestamps",
            )
        last_s = row.time_s
        yield row


def _covered_s(requests: list[Request]) -> float:
    last_s = requests[-1].arrival_s
    # One mean gap after the last request: at the seam of the ring the rate is then as elsewhere.
    mean_gap_s = last_s / (len(requests) - 1) if len(requests) > 1 else 0.0
    return max(last_s + mean_gap_s, MIN_DURATION_S)


def _cut(
    trace: Trace, rate_scale: float, start_s: float, wanted_s: float, length_s: float, num_laps: int
) -> Iterator[Request]:
    for lap in range(num_laps):
        for request in trace.requests:
            at_s = request.arrival_s / rate_scale + lap * length_s - start_s
            if at_s >= wanted_s:
                break
            if at_s >= 0:
                yield Request(at_s, request.input_tokens, request.output_tokens)
