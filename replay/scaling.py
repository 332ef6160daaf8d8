"""Lengths of a trace fitted into a server's limits, and prompts of those lengths."""

from __future__ import annotations

from dataclasses import dataclass

from replay.loadgen import PlannedRequest
from replay.traces import Trace


@dataclass(frozen=True, slots=True)
class LengthLimits:
    max_prompt_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class LengthScaling:
    """What was done to the lengths of the trace."""

    limits: LengthLimits
    prompt_factor: float
    output_factor: float
    prompt_clipped_frac: float
    output_clipped_frac: float
    prompt_tokens_mean: float
    output_tokens_mean: float


def length_limits(
    max_model_len: int, *, max_prompt_tokens: int | None = None, max_output_tokens: int | None = None
) -> LengthLimits:
    """Limits whose sum fits ``max_model_len``.

    Raises:
        InputError: they do not fit.
    """
    raise NotImplementedError


def plan_requests(
    trace: Trace, *, limits: LengthLimits, num_servers: int, seed: int
) -> tuple[list[PlannedRequest], LengthScaling]:
    """Requests for `run_load`: lengths scaled, servers in turn, prompts of random token ids.

    Use another ``seed`` for every run against the same server: equal prompts would hit its prefix cache.
    """
    raise NotImplementedError
