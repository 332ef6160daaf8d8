"""vLLM's entry point ``vllm.stat_logger_plugins``: one logger per engine and API server.

What vLLM calls is a subclass of its own base class; if that has moved, this module does not import, vLLM says so in its
log and serves without it.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from .gate_writer import process_heartbeat
from .identity import gate_directory
from .log import plugin_logger
from .middleware import open_slot_quietly
from .recorder import StepRecorder
from .records import SlotFlag, clamp_count
from .step_ring import StepRing

logger = plugin_logger(__name__)


class WadilocoStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Writes each engine step into the gate and the ring."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        engine = clamp_count(engine_index)
        slot = open_slot_quietly(SlotFlag.ENGINE, engine=engine)
        self._recorder = StepRecorder(slot, open_ring_quietly(gate_directory(sys.argv), vllm_config, engine))

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        self._recorder.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, *_args: Any, **_kwargs: Any) -> None:
        """A sleeping engine runs nothing: its last step said so."""


def open_ring_quietly(directory: Path | None, vllm_config: Any, engine: int) -> StepRing | None:
    """The ring of one engine, or None with a line in the log."""
    if directory is None:
        return None
    try:
        scheduler = getattr(vllm_config, "scheduler_config", None)
        ring = StepRing(directory, engine=engine, max_num_seqs=clamp_count(getattr(scheduler, "max_num_seqs", None)))
        process_heartbeat().add(ring.beat)
        atexit.register(ring.close)
    except Exception:
        logger.exception("step records are off")
        return None
    return ring
