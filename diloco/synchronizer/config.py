"""Settings of the synchronizer."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from diloco.schema import MAX_SLOTS
from service.settings import ServiceSettings


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
    round_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """A round whose quorum does not fill closes with those who came, this long after the first of them."""
    max_contribution_bytes: int = Field(default=16 << 30, ge=4)
    """Refuse models whose parameters are larger than this as fp32."""
    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads for the outer step."""
