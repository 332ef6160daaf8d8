"""Lengths of a trace fitted into a server's limits, and prompts of those lengths.

factor = min(1, limit / p95 of the trace), then each length is rounded and clipped to [1, limit]: the shape of the
distribution stays, and about one request in twenty is cut. What was done is in `LengthScaling`, for the report.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replay.loadgen import PlannedRequest
from replay.traces import Trace
from service.errors import InputError

TOKEN_IDS = range(3, 251)
"""In every vocabulary of 256 or more, and past the special tokens (padding, begin, end) of nearly all."""
DEFAULT_OUTPUT_FRAC = 0.25
"""Share of the context that answers get when nothing is asked for; prompts are the longer part in public traces."""


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


@dataclass(frozen=True, slots=True)
class Scaled:
    lengths: list[int]
    factor: float
    clipped_frac: float


def length_limits(
    max_model_len: int, *, max_prompt_tokens: int | None = None, max_output_tokens: int | None = None
) -> LengthLimits:
    """Limits whose sum fits ``max_model_len``; one that is not given takes what the other leaves.

    Raises:
        InputError: they do not fit.
    """
    for name, value in (("--max-prompt-tokens", max_prompt_tokens), ("--max-output-tokens", max_output_tokens)):
        if value is not None and not 1 <= value < max_model_len:
            raise InputError(
                f"must be between 1 and {max_model_len - 1}, got {value}",
                field=name,
                remedy=f"the server's max_model_len is {max_model_len}",
            )
    if max_output_tokens is None:
        left = max_model_len - (max_prompt_tokens or 0)
        max_output_tokens = left if max_prompt_tokens else max(1, int(left * DEFAULT_OUTPUT_FRAC))
    if max_prompt_tokens is None:
        max_prompt_tokens = max_model_len - max_output_tokens
    if max_prompt_tokens + max_output_tokens > max_model_len or max_prompt_tokens < 1:
        raise InputError(
            f"{max_prompt_tokens} + {max_output_tokens} tokens exceed the server's max_model_len {max_model_len}",
            field="--max-prompt-tokens, --max-output-tokens",
            remedy="lower one of them",
        )
    return LengthLimits(max_prompt_tokens, max_output_tokens)


def plan_requests(
    trace: Trace, *, limits: LengthLimits, num_servers: int, seed: int
) -> tuple[list[PlannedRequest], LengthScaling]:
    """Requests for `run_load`: lengths scaled, servers in turn, prompts of random token ids.

    Use another ``seed`` for every run against the same server: equal prompts would hit its prefix cache.
    """
    prompts = scale_lengths([request.input_tokens for request in trace.requests], limits.max_prompt_tokens)
    outputs = scale_lengths([request.output_tokens for request in trace.requests], limits.max_output_tokens)
    draw = random.Random(seed)
    planned = [
        PlannedRequest(
            arrival_s=request.arrival_s,
            server_index=index % num_servers,
            prompt_token_ids=tuple(draw.choices(TOKEN_IDS, k=prompt_tokens)),
            max_tokens=max_tokens,
        )
        for index, (request, prompt_tokens, max_tokens) in enumerate(
            zip(trace.requests, prompts.lengths, outputs.lengths, strict=True)
        )
    ]
    scaling = LengthScaling(
        limits=limits,
        prompt_factor=prompts.factor,
        output_factor=outputs.factor,
        prompt_clipped_frac=prompts.clipped_frac,
        output_clipped_frac=outputs.clipped_frac,
        prompt_tokens_mean=sum(prompts.lengths) / len(planned),
        output_tokens_mean=sum(outputs.lengths) / len(planned),
    )
    return planned, scaling


def scale_lengths(lengths: Sequence[int], limit: int) -> Scaled:
    """Lengths times one factor, cut where they are still too long (see the module's text)."""
    p95 = float(np.percentile(lengths, 95))
    factor = min(1.0, limit / p95) if p95 > 0 else 1.0
    scaled = [round(length * factor) for length in lengths]
    return Scaled(
        lengths=[min(max(length, 1), limit) for length in scaled],
        factor=factor,
        clipped_frac=sum(length > limit for length in scaled) / len(scaled),
    )
