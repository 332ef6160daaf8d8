"""The sidecar's part in the gate of its server: the pace, and the load where nobody in the server's process says it.

Middleware and plugin know of every request and step. Where neither is installed the newest scrape has to do: the gate
then closes and opens at the scrape's cadence, up to an interval late, and the state says ``source=scrape``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from sidecar.pace import PaceReason
from sidecar.pace_order import keep_order, read_order
from sidecar.schema import EngineState, LoadSample, Pace, PaceMode
from sidecar.vllm_plugin.gate_reader import GateReader, GateState
from sidecar.vllm_plugin.gate_writer import HEARTBEAT_PERIOD_S, GateWriter
from sidecar.vllm_plugin.records import SlotFlag

logger = logging.getLogger(__name__)

GATE_PERIOD_S = HEARTBEAT_PERIOD_S
EXACT_SOURCES = ("ingress", "engine")
FRESH_INTERVALS = 3
"""A scrape that is older than so many intervals says nothing about now."""
ABSENT_AFTER_S = 10.0
"""A server that is ready has its writers long since; a restart of an API server takes them away for less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the sidecar writes into its slot."""

    flags: int
    pace: float
    running: int = 0
    waiting: int = 0


def order_of(pace: Pace, sample: LoadSample | None, *, is_fresh: bool) -> Order:
    """What to write (pure).

    Load that is unknown is left out, and so is the pace that follows from it: whether somebody else knows the load is
    the reader's to judge, who takes the gate for unknown if nobody does.
    """
    flags = SlotFlag.SIDECAR
    if pace.mode is PaceMode.RUN:
        flags |= SlotFlag.RUN_ORDERED
    if pace.reason == PaceReason.LOAD_UNKNOWN:
        pace = pace.model_copy(update={"pace": 1.0})
    if sample is None or not is_fresh or sample.state is not EngineState.READY:
        return Order(flags=flags, pace=pace.pace)
    if sample.running is None or sample.waiting is None:
        return Order(flags=flags, pace=pace.pace)
    return Order(
        flags=flags | SlotFlag.SCRAPED, pace=pace.pace, running=round(sample.running), waiting=round(sample.waiting)
    )


class WriterWatch:
    """Tells once when nobody in the process of a ready server writes into the folder, and once when somebody does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._absent_since_s: float | None = None
        self._is_told = False

    def check(self, *, is_exact: bool, is_ready: bool, now_s: float) -> None:
        if is_exact or not is_ready:
            self._absent_since_s = None
        elif self._absent_since_s is None:
            self._absent_since_s = now_s
        if is_exact and self._is_told:
            self._is_told = False
            logger.info("a plugin or middleware writes in %s: the gate follows it", self._directory)
        elif self._absent_since_s is not None and not self._is_told and now_s - self._absent_since_s >= ABSENT_AFTER_S:
            self._is_told = True
            logger.warning(
                "no plugin or middleware writes in %s: the gate follows the scrapes; is it the server's "
                "WADILOCO_GATE_DIR?",
                self._directory,
            )


class GateKeeper:
    """Writes the sidecar's slot and reads the whole gate. Its heartbeat is its caller's tick: a sidecar that hangs
    falls silent."""

    def __init__(self, directory: Path, *, scrape_interval_s: float) -> None:
        self._directory = directory
        self._writer = GateWriter(directory, SlotFlag.SIDECAR)
        self._reader = GateReader(directory)
        self._writers = WriterWatch(directory)
        self._fresh_s = FRESH_INTERVALS * scrape_interval_s
        self.state = GateState(True, self._reader.read(0.0).reason)
        self.mode = read_order(directory)
        """The operator's order, from an earlier sidecar's time too."""
        if self.mode is not PaceMode.AUTO:
            logger.warning("pace mode=%s: an order from before this start, PUT /v1/pace auto ends it", self.mode)

    def order(self, mode: PaceMode) -> None:
        """Take an operator's order, and keep it for the sidecars to come."""
        self.mode = mode
        try:
            keep_order(self._directory, mode)
        except OSError as exc:
            logger.warning("pace mode=%s ends with this sidecar, it cannot be kept: %s", mode, exc)

    @property
    def is_exact(self) -> bool:
        """Whether somebody in the server's process says when requests come and go."""
        return self.state.source in EXACT_SOURCES

    @property
    def complaint(self) -> str:
        """What is wrong with this sidecar's part; empty when nothing is."""
        if not self._writer.complaint and self.state.sidecars > 1:
            return f"{self.state.sidecars} sidecars write this gate, and the lowest pace holds: one per gate"
        return self._writer.complaint

    def tick(self, pace: Pace, sample: LoadSample | None, *, age_s: float, now_s: float) -> GateState:
        """Write what holds now, prove life, and say what the gate is."""
        self.state = self._reader.read(now_s)
        is_ready = sample is not None and sample.state is EngineState.READY and not self.complaint
        self._writers.check(is_exact=self.is_exact, is_ready=is_ready, now_s=now_s)
        order = order_of(pace, sample, is_fresh=age_s <= self._fresh_s)
        self._writer.beat()
        self._writer.update(flags=order.flags, pace=order.pace, running=order.running, waiting=order.waiting)
        return self.state

    def close(self) -> None:
        """Give the slot back. A pause stays in it: trainers then take this sidecar for dead, and yield."""
        if self.mode is PaceMode.PAUSE:
            self._writer.update(flags=SlotFlag.SIDECAR, pace=0.0, running=0, waiting=0)
            self._writer.abandon()
        self._writer.close()
        self._reader.close()
