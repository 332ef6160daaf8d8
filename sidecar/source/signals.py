"""The signals that the sidecar reads, and the series that vLLM has exported them under.

A version that renames a series costs a line here, and until then a loud alarm: what is missing is never taken for 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

ALIASES: dict[str, tuple[str, ...]] = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "waiting_capacity": ("num_requests_waiting_by_reason",),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "kv_capacity": ("cache_config_info",),
    "sleep_state": ("engine_sleep_state",),
    "steps": ("iteration_tokens_total_count",),
    "finished": ("request_success_total",),
    "prompt_tokens": ("prompt_tokens_total",),
    "generation_tokens": ("generation_tokens_total",),
    "preemptions": ("num_preemptions_total",),
    "rejections": ("admission_rejections_total",),
    "created": ("generation_tokens_created",),
}
"""Signal → names that vLLM has exported it under, newest first. The first one on the page is taken alone: while a name
is being deprecated both are exported, and adding them would count twice."""

HISTOGRAM_ALIASES: dict[str, tuple[str, ...]] = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "tpot": ("request_time_per_output_token_seconds",),
    "e2e": ("e2e_request_latency_seconds",),
}
NEEDED_SIGNALS = ("running", "waiting", "kv_usage", "steps", "finished", "generation_tokens", "ttft", "itl", "e2e")
"""Signals without which the sidecar is blind to something; the others are absent from some versions or modes."""

LOAD_GAUGES = frozenset({"running", "waiting", "kv_usage"})
"""Set by the engine's steps: in Prometheus multiprocess mode they are absent until the first one."""

KNOWN_PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:")
"""What vLLM's series are known to begin with, for advice on a wrong --metric-prefix."""


class Wanted(NamedTuple):
    signal: str
    rank: int
    """Place of the matching name in its alias list."""
    part: str
    """``value``, or ``bucket``, ``sum`` of a histogram."""


def wanted_names(prefix: str) -> Iterator[tuple[str, Wanted]]:
    """Every sample name that matters on a page whose series begin with ``prefix``."""
    for signal, names in ALIASES.items():
        for rank, name in enumerate(names):
            yield prefix + name, Wanted(signal, rank, "value")
    for signal, names in HISTOGRAM_ALIASES.items():
        for rank, name in enumerate(names):
            for part in ("bucket", "sum"):
                yield f"{prefix}{name}_{part}", Wanted(signal, rank, part)


def series_of(prefix: str, signal: str, rank: int) -> str:
    """The series that matched, as the user finds it on the page."""
    return prefix + (ALIASES.get(signal) or HISTOGRAM_ALIASES[signal])[rank]
