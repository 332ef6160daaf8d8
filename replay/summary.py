"""``summary.json``: everything that a replay measured, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.errors import InputError, UnavailableError
from service.files import read_regular, replace_file

MAX_SUMMARY_BYTES = 64 << 20
"""Of a thousand runs it has some 2 MB; a file beyond this is no summary."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Percentiles(_Part):
    p50: float
    p95: float
    p99: float


class SloSpec(_Part):
    """What a request must meet, all of it."""

    metric: Literal["ttft", "itl", "tpot", "e2e"]
    """The objective that the picture shows: e2e, or else the first."""
    threshold_ms: float = Field(gt=0)
    objectives_ms: dict[str, float] = Field(default_factory=dict)
    """Metric → threshold, of all objectives; empty in files of earlier versions, which had one."""
    target_frac: float | None = None
    """Share of requests that must meet all of them."""

    @property
    def thresholds_ms(self) -> dict[str, float]:
        return self.objectives_ms or {self.metric: self.threshold_ms}


class Budget(_Part):
    outer_syncs: int | None
    """None: as many as the policy likes."""
    min_gap_s: float


class TraceSlice(_Part):
    """What of the trace was replayed, and how bursty it is."""

    format: str
    rate_scale: float
    start_s: float
    duration_s: float
    num_requests: int
    mean_rate_per_s: float
    peak_rate_per_s: float
    variance_to_mean: float
    empty_frac: float


class Scaling(_Part):
    """What was done to the lengths so that they fit the server."""

    max_prompt_tokens: int
    max_output_tokens: int
    prompt_factor: float
    output_factor: float
    prompt_clipped_frac: float
    output_clipped_frac: float
    prompt_tokens_mean: float
    output_tokens_mean: float


class Machine(_Part):
    cpu_count: int
    cpu_model: str | None = None
    memory_bytes: int | None = None
    platform: str
    python: str


class ServerSummary(_Part):
    """One server that was replayed against."""

    url: str
    model: str
    max_model_len: int
    vllm_version: str | None = None
    requests: int
    """Over all runs."""


class Experiment(_Part):
    """What ran, for whoever wants to run it again."""

    wadiloco_version: str
    command: str
    settings: dict[str, Any]
    servers: list[ServerSummary]
    islands: int


class Run(_Part):
    """One policy on one seed and draw."""

    policy: str
    seed: int
    draw: int
    mode: Literal["live", "sim"]
    requests: int
    violations: int
    """Requests that missed an objective, and requests that failed."""
    violation_rate: float
    sync_excess_rate: float | None
    """Share of all requests that violated the objective because of syncs; None without requests outside syncs."""
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    outer_syncs: int
    sync_busy_s: float
    """Seconds of syncs, added over the islands."""
    tokens_trained: int
    final_loss: float | None
    loadgen_late_p99_ms: float | None
    inner_steps: int = 0
    first_loss: float | None = None
    failed_requests: dict[str, int] = Field(default_factory=dict)
    """Status → number, for requests that did not end ok."""
    errors: list[str] = Field(default_factory=list)
    started_unix_s: float | None = None
    notes: list[str] = Field(default_factory=list)


class Comparison(_Part):
    """Paired over seeds: ``mean_diff`` is a minus b."""

    a: str
    b: str
    metric: str
    mean_diff: float
    ci95: tuple[float, float] | None
    """None from a single seed, which has no spread."""
    p_value: float | None
    n: int


class Summary(_Part):
    trace: str
    slo: SloSpec
    budget: Budget
    runs: list[Run]
    comparisons: list[Comparison]
    gap_closed: dict[str, float | None]
    """Policy → share of the way from random to oracle; None without an oracle or without a gap."""
    slice: TraceSlice | None = None
    scaling: Scaling | None = None
    machine: Machine | None = None
    experiment: Experiment | None = None
    generated_at: str | None = None
    """ISO 8601, UTC."""
    timeline: str | None = None
    """Picture, relative to this file."""
    notes: list[str] = Field(default_factory=list)


def write_json(summary: Summary, path: Path) -> None:
    """Write atomically: readers, and whoever looks after a crash, see the old file or the whole new one.

    Raises:
        UnavailableError: no space, or no permission; the old file is untouched.
    """
    try:
        replace_file(path, [summary.model_dump_json(indent=2).encode(), b"\n"])
    except OSError as exc:
        raise UnavailableError(
            f"cannot write {path}: {exc.strerror or exc}", field="--out", remedy="free space or choose another --out"
        ) from exc


def read_json(path: Path) -> Summary:
    """Read what `write_json` wrote.

    Raises:
        InputError: no such file, or not a summary.
    """
    try:
        return Summary.model_validate_json(read_regular(path, max_bytes=MAX_SUMMARY_BYTES))
    except OSError as exc:
        raise InputError(f"cannot be read: {exc.strerror or exc}", field=str(path)) from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"is not a summary: {where}: {first['msg']}", field=str(path), remedy="give a summary.json of this version"
        ) from exc
