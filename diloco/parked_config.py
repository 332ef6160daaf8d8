"""What an agent tells a worker that is to park; apart from what the worker does, which needs torch."""

from __future__ import annotations

from typing import Literal

from diloco.protocol import WorkerConfig
from service.wire import Wire


class ParkedConfig(Wire):
    """The first line of a worker that is to park: what all slots have in common."""

    parked: Literal[True] = True
    config: WorkerConfig
    """Of slot 0, or any other: its slot, its vault and where it starts count for nothing."""
    refresh_s: float
