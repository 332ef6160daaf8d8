"""What snapshots cost an inner step: slices of steps with and without them, in turns, in one process.

The rank is the library's: inner loop, guard and vault, as the worker puts them together. Each slice is timed whole, so
that what is done between two steps counts; the snapshot under way is waited for within the slice that began it. The
processor time of all threads is told beside it: on a busy machine that says more, and it holds all of the copy, which a
free core takes off the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.agent.vaults import Vaults
from diloco.byte_text import ByteText
from diloco.codec import codec_named
from diloco.inbox import Inbox
from diloco.inner import InnerConfig, InnerLoop, adamw
from diloco.model import ModelSize, build_model
from diloco.protocol import Event, VaultCommand, VaultNeedEvent, VaultPlace, WorkerConfig
from diloco.shards import connect
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.team import Team
from diloco.vault.contents import HotState
from diloco.vault.guard import Guard
from diloco.vault.members import HELD_PER_FRAGMENT
from diloco.vault.resumption import leader_contents
from diloco.vault.snapshots import Contents
from diloco.workload import Part, Shard
from diloco.workload_loading import open_batches
from service.settings import PeerSettings
from tests.diloco.worker_configs import tiny_config

NOBODY = "http://127.0.0.1:9"
"""Where the synchronizer would be, which is never asked."""
SLICE_S = 4.0
"""About as long as each slice is."""
SETTLING_STEPS = 24
"""Until the interval is chosen by what snapshots cost."""


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """Step times with snapshots over those without, and what led to them."""

    ratios: list[float]
    """Of each slice with snapshots to the mean of the slices before and after it."""
    cpu_ratios: list[float]
    """The same of the processor time."""
    step_s: float
    """Without, the mean."""
    interval: int
    """Steps from one snapshot to the next, at the end."""


class Times(NamedTuple):
    """Of one step, in seconds."""

    wall_s: float
    cpu_s: float


class ProtectedRank:
    """A rank alone with a vault of its own."""

    def __init__(self, size: ModelSize, corpus: Path, directory: Path) -> None:
        torch.set_num_threads(1)
        self._module = build_model(size, seed=0)
        self._island = StreamingIsland(self._module, codec_named("fp32"))
        self._shards = connect(PeerSettings(), NOBODY, timeout_s=1.0)
        self._exchange = StreamingExchange(self._island, self._shards, slot=0)
        self._exchange.continue_as(1)
        config = _config(size, corpus)
        self._inner = InnerLoop(
            self._module,
            InnerConfig(),
            optimizer=(optimizer := adamw(self._module, InnerConfig())),
            average=self._average,
        )
        self._inbox = Inbox()
        self._vaults = Vaults(directory, identity="bench", num_ranks=1, instance="bench")
        self._vaults.take_slot(0, adopt=False, run_id="")
        self.guard = Guard(
            config,
            self._module,
            optimizer,
            team=Team(),
            inbox=self._inbox,
            emit=self._hear,
            collect=self._contents,
            per_fragment=HELD_PER_FRAGMENT[False],
        )
        workload = ByteText(size, data=(corpus,), batch_size=config.batch_size)
        self._batches = open_batches(workload, Shard(slot=0, num_shards=1, seed=0), Part(), position=0)
        self.interval = 1

    def _average(self, loss: Tensor) -> Tensor:
        self.guard.settle()
        return loss

    def _hear(self, event: Event) -> None:
        """As the agent does."""
        if isinstance(event, VaultNeedEvent):
            path = self._vaults.make(0, event.regions, event.record_bytes)
            self._inbox.handle(VaultCommand(path=path).model_dump_json())

    def _contents(self, hot: HotState) -> Contents:
        more = leader_contents(
            self._island,
            self._exchange,
            captured=None,
            under_way=None,
            loss=self._inner.loss,
            loss_at_sync=None,
            last_sync_at_s=None,
        )
        return Contents(
            step=self._inner.step,
            tokens=0,
            skipped=0,
            hot=hot.capture(),
            vectors=more.vectors,
            versions=more.versions,
            state=more.state.model_dump(mode="json", exclude_none=True),
        )

    def slice_s(self, num_steps: int, *, is_protected: bool) -> Times:
        """Seconds per step."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            started_s = time.perf_counter()
            self._inner.take_step(next(self._batches))
            if is_protected:
                self.guard.after_step(self._inner.step, time.perf_counter() - started_s)
        self.guard.settle()
        return Times((time.perf_counter() - began_s) / num_steps, (time.process_time() - cpu_s) / num_steps)

    @property
    def steps_at_risk(self) -> int:
        return self.guard.interval

    def close(self) -> None:
        self.guard.close()
        self._vaults.drop()
        self._shards.close()


def measure_snapshots(size: ModelSize, corpus: Path, directory: Path, *, num_pairs: int) -> SnapshotCost:
    """So many slices with snapshots, each between two without."""
    rank = ProtectedRank(size, corpus, directory)
    try:
        rank.slice_s(SETTLING_STEPS, is_protected=True)
        step_s = rank.slice_s(4, is_protected=False).wall_s
        # Of whole intervals: a slice has its share of snapshots.
        interval = max(rank.steps_at_risk, 1)
        num_steps = interval * max(1, round(SLICE_S / step_s / interval))
        without, protected = [rank.slice_s(num_steps, is_protected=False)], []
        for _ in range(num_pairs):
            protected.append(rank.slice_s(num_steps, is_protected=True))
            without.append(rank.slice_s(num_steps, is_protected=False))
        wall = _ratios([each.wall_s for each in protected], [each.wall_s for each in without])
        cpu = _ratios([each.cpu_s for each in protected], [each.cpu_s for each in without])
        return SnapshotCost(wall, cpu, sum(each.wall_s for each in without) / len(without), rank.steps_at_risk)
    finally:
        rank.close()


def _ratios(those: list[float], between: list[float]) -> list[float]:
    return [each / ((between[i] + between[i + 1]) / 2) for i, each in enumerate(those)]


def _config(size: ModelSize, corpus: Path) -> WorkerConfig:
    return tiny_config(
        corpus,
        NOBODY,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        width=size.width,
        context=size.context,
        data_shards=1,
        batch_size=1,
        lr=1e-3,
        warmup_steps=50,
        vault=VaultPlace(),
    )
