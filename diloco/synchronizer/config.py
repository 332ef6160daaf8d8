"""Settings of the synchronizer."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from diloco.schema import MAX_SLOTS, MAX_STALENESS, CodecName
from diloco.synchronizer.rounds import RoundRules
from service.settings import ServiceSettings

MAX_DELAY = 64
"""A momentum that is older than so many outer steps is of another time; as many are kept for stale contributions."""


class SynchronizerSettings(ServiceSettings):
    """Holds the global parameters of a run and takes its outer steps."""

    service: ClassVar[str] = "synchronizer"

    port: int = Field(default=9600, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one and logs it."""
    directory: Path
    """Where the run's state lives (created if missing). A run goes on from it; a new run needs its own."""
    quorum: int = Field(default=1, ge=1, le=MAX_SLOTS)
    """Slots whose contributions close a round: the number of islands for synchronous DiLoCo."""
    outer_lr: float = Field(default=0.7, gt=0, le=10)
    """Learning rate of the outer Nesterov step."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer Nesterov step."""
    outer_optimizer: Literal["nesterov", "delayed_nesterov"] = "nesterov"
    """How momentum is taken: at every outer step, or once every ``outer_delay`` of them, for rounds that islands close
    at moments of their own and with stale contributions (arXiv 2401.09135)."""
    outer_delay: int = Field(default=4, ge=1, le=MAX_DELAY)
    """Outer steps for one of the momentum with ``delayed_nesterov``; each moves the parameters by a share of the
    learning rate, so that so many come to one step of ``nesterov``. The number of islands that close rounds alone."""
    momentum_activation: float = Field(default=0.0, ge=0, le=1)
    """Share of the momentum in the steps between with ``delayed_nesterov``: from 0, none, to one in ``outer_delay``."""
    round_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """A round whose quorum does not fill closes with those who came, this long after the first of them."""
    grace_min_s: float = Field(default=0.0, ge=0, le=3600)
    """Shortest time that a round stays open for stragglers after its quorum; how long it does follows from how late
    contributions were lately."""
    grace_max_s: float = Field(default=5.0, ge=0, le=3600)
    """Longest such time, and the one while nothing is known; 0 closes rounds at their quorum. A round to which all
    known islands have come waits for nobody."""
    max_staleness: int = Field(default=0, ge=0, le=MAX_STALENESS)
    """Versions that a contribution may be behind: it is then taken into the open round with less weight. 0 is the
    synchronous rule: it is refused, and the island keeps its progress for its next contribution."""
    staleness_exponent: float = Field(default=0.5, ge=0, le=10)
    """A contribution that is s versions behind weighs (1 + s) to the minus this."""
    pull_codec: CodecName = "fp32"
    """How new global parameters travel to the islands: whole as fp32, or as their encoded difference from the ones
    before, the error of which the next difference makes good (bf16, int8, int4)."""
    max_contribution_bytes: int = Field(default=16 << 30, ge=4)
    """Refuse models whose parameters are larger than this as fp32."""
    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads for the outer step."""

    @model_validator(mode="after")
    def _check_grace(self) -> Self:
        if self.grace_min_s > self.grace_max_s:
            raise ValueError(
                f"grace_min_s {self.grace_min_s:g} is over grace_max_s {self.grace_max_s:g}: lower it, or raise that"
            )
        return self

    @model_validator(mode="after")
    def _check_activation(self) -> Self:
        if self.outer_optimizer == "delayed_nesterov" and self.momentum_activation * self.outer_delay > 1:
            raise ValueError(
                f"momentum_activation {self.momentum_activation:g} is over one in outer_delay {self.outer_delay}:"
                f" give at most {1 / self.outer_delay:g}, or lower that"
            )
        return self

    @property
    def round_rules(self) -> RoundRules:
        return RoundRules(
            quorum=self.quorum,
            timeout_s=self.round_timeout_s,
            grace_min_s=self.grace_min_s,
            grace_max_s=self.grace_max_s,
            max_staleness=self.max_staleness,
            staleness_exponent=self.staleness_exponent,
        )
