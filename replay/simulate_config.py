"""Settings of ``wadiloco simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from replay.config import BUNDLED_TRACE, check_h, check_policies, check_slo
from service.settings import CommaSeparated, Settings

ORACLE = "oracle"


class SimulateSettings(Settings):
    """Simulate one slice of a trace per seed, once per policy, and compare."""

    service: ClassVar[str] = "simulate"

    trace: Path = BUNDLED_TRACE
    """Trace file: Azure CSV, Mooncake JSONL, BurstGPT CSV, or JSONL of arrival_s, input_tokens, output_tokens."""
    trace_format: str = Field(default="auto", pattern="^(auto|azure|mooncake|burstgpt|jsonl)$")
    """auto, azure, mooncake, burstgpt or jsonl."""
    rate_scale: float = Field(default=1.0, gt=0)
    """Divide the trace's time axis by this: 2 doubles the request rate and keeps the shape of bursts."""
    start_s: float = Field(default=0.0, ge=0)
    """Where the slice of seed 0 begins, in replay seconds; seed k begins k durations later."""
    duration_s: int = Field(default=120, ge=10, le=100_000)
    """Length of the slice, in replay seconds."""
    warm_up_s: int = Field(default=600, ge=0, le=1_000_000)
    """Seconds of the trace before the first slice (its end, for a slice at its beginning) that the sidecars have seen
    already; a sync now and then teaches the calibration."""
    policies: CommaSeparated = ("no_sync", "random_deferral", "fixed_h", "wa_diloco", "wa_forecast", ORACLE)
    """Policies to compare, comma-separated: those of wadiloco replay (or of an installed package), and oracle."""
    policy_params: dict[str, float] = Field(default_factory=dict)
    """POLICY.PARAM=VALUE overrides, such as wa_diloco.threshold=0.1 (repeat the option for more)."""
    seeds: int = Field(default=5, ge=1)
    """Repetitions, each on its own slice of the trace."""
    draws: int = Field(default=25, ge=1)
    """Draws of random_deferral per seed."""
    slo: Annotated[str, BeforeValidator(check_slo)] = "e2e:300ms"
    """What a request must meet: ttft, itl, tpot, e2e, each with a threshold in ms or s, such as ttft:200ms,e2e:2s."""
    out: Path = Path("out/simulate")
    """Directory for summary.json and report.md."""
    as_json: bool = False
    """Print the summary as JSON instead of a table; --json for short."""

    servers: int = Field(default=1, ge=1, le=64)
    """Servers; requests go to them in turn, and beside each an island trains."""
    first_token_ms: float = Field(default=30.0, gt=0)
    """Time to first token of the service model."""
    per_token_ms: float = Field(default=5.0, ge=0)
    """Time per further token of the service model."""
    max_output_tokens: int = Field(default=32, ge=1)
    """Answers of the trace are scaled down to this."""
    sync_slowdown: float = Field(default=5.0, ge=1)
    """A request that overlaps a sync takes so many times as long."""
    sync_s: float = Field(default=2.0, gt=0, le=60)
    """Length of a sync."""
    lag_s: float = Field(default=0.5, ge=0, le=10)
    """From what the sidecars saw last to the beginning of a sync that was decided on it."""
    step_ms: float = Field(default=200.0, gt=0)
    """Length of an inner step."""
    tokens_per_step: int = Field(default=2048, ge=1)
    """Tokens that an island trains on per inner step."""
    outer_syncs: int = Field(default=6, ge=0)
    """Sync budget: outer syncs that a policy may spend during the slice (no_sync spends none)."""
    min_gap_s: float = Field(default=3.0, ge=0)
    """Least time between two outer syncs."""
    min_h: int = Field(default=8, ge=1)
    """Least inner steps between two outer syncs."""
    max_h: int = Field(default=1_000_000, ge=1)
    """Inner steps after which a sync is forced while the budget lasts; by default never, since the oracle is not bound
    by it."""
    busy_requests: int = Field(default=8, ge=1)
    """Requests in a server at which its sidecar calls it fully loaded."""

    @property
    def gap_s(self) -> float:
        """Least time from a decision to the next: the gap counts from the start of the sync, the steps from its end."""
        return self.lag_s + max(self.min_gap_s, self.sync_s + self.min_h * self.step_ms / 1e3)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_policies(self.policies, self.policy_params, beside=(ORACLE,))
        check_h(self.min_h, self.max_h)
        if self.outer_syncs * self.gap_s >= self.duration_s:
            raise ValueError(
                f"outer_syncs {self.outer_syncs} at {self.gap_s:g} s each (min_gap_s, or sync_s and min_h steps) do not"
                f" fit into duration_s {self.duration_s}: lower one of the first or raise the last"
            )
        return self
