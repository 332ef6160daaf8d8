"""What an outer sync costs: bytes both ways, the time that inner steps stand still, and the synchronizer's CPU.

``make bench``, or this file alone; ``BENCH_OUTER_SYNC='parameters rounds'`` sets its size (20 million, 3). A real
synchronizer process on loopback, and islands as threads of this process: each has an inner loop, which here only waits
a moment per step and serves its boundary, and a transfer thread, as the rank worker has. All sync at once with overlap.

Bytes are those of one island's sync against fp32 both ways. Blocked is the time in which its inner steps stood still
(to copy, to adopt), alone and as a share of the sync's duration; beside it, when its contribution was in. All are of
the median sync. GB/s are fp32 bytes that contributions stand for per second of the synchronizer's CPU, with all that it
does for a round: it takes the uploads, verifies, decodes and merges them, writes the generation, encodes and serves it.
What else runs on the machine does not count there, but shares its caches.

Below each row is where the round goes: seconds of CPU per GB of fp32 bytes that contributions stand for, and wall time
of the threads that did it, of all islands together and of the synchronizer (`diloco.stages`); the rest of its CPU time
is HTTP and the event loop. ``BENCH_OUTER_SYNC_RUNS='2:fp32:fp32 4:int4:int4'`` takes only these.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from diloco.boundary import StepBoundary
from diloco.codec import CODECS, codec_named
from diloco.exchange import Exchange
from diloco.fragment import flatten_module
from diloco.island import Island
from diloco.protocol import SyncCommand
from diloco.schema import CodecName, SyncOutcome, SyncReport
from diloco.stages import STAGES, Spent
from diloco.transport import SynchronizerClient
from tests.bench.process_cost import cpu_s
from tests.diloco.conftest import SynchronizerProcess

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

SIZE, ROUNDS = (int(float(word)) for word in os.environ.get("BENCH_OUTER_SYNC", "20e6 3").split())
WIDTH = 1000
"""Of the model's matrices: it has as many as come nearest to the size."""
STEP_S = 0.005
DEADLINE_S = 600.0
PAIRS: tuple[tuple[CodecName, CodecName], ...] = (
    ("fp32", "fp32"),
    ("int4", "fp32"),
    ("int8", "int8"),
    ("int4", "int4"),
)
MAX_SHARE = 0.135
"""Of the bytes of fp32, with int4 both ways."""


class Model(nn.Module):
    """Matrices and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        count = max(SIZE // WIDTH**2, 1)
        width = min(WIDTH, int(SIZE**0.5))
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(width, width) / WIDTH) for _ in range(count)])


class BenchIsland:
    """An island whose inner steps are short waits."""

    def __init__(self, url: str, codec: CodecName, *, slot: int) -> None:
        torch.manual_seed(0)
        self.island = Island(Model(), CODECS[codec])
        self._client = SynchronizerClient(httpx.Client(base_url=url, timeout=60, trust_env=False))
        self._exchange = Exchange(self.island, self._client, slot=slot)
        self._exchange.join(deadline_s=time.time() + DEADLINE_S)
        self._boundary = StepBoundary(Event())
        self._transfers = ThreadPoolExecutor(1)
        torch.manual_seed(slot)
        self._progress = [1e-3 * torch.randn_like(each) for each in self.island.module.parameters()]

    @torch.no_grad()
    def sync(self, round_number: int) -> SyncReport:
        for parameter, progress in zip(self.island.module.parameters(), self._progress, strict=True):
            parameter.sub_(progress)
        self.island.count_step(1)
        command = SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + DEADLINE_S, overlap=True)
        started_s, self._boundary.blocked_s = time.time(), 0.0
        captured = self._boundary.time(self._exchange.capture)
        end = self._transfers.submit(lambda: self._exchange.run(command, captured=captured, at_boundary=self._boundary))
        while not end.done():
            time.sleep(STEP_S)
            self._boundary.serve()
        report = end.result()
        assert report is not None
        assert report.outcome is SyncOutcome.APPLIED, report.detail
        return report.model_copy(update={"started_s": started_s, "blocked_s": self._boundary.blocked_s})

    def close(self) -> None:
        self._transfers.shutdown()
        self._client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of some rounds."""

    bytes_pushed: float
    """Of one island's sync, per fp32 byte of the model."""
    bytes_pulled: float
    sync_s: float
    pushed_s: float
    """Until its contribution was in."""
    blocked_s: float
    blocked_share: float
    gb_per_cpu_s: float
    stages: Mapping[str, Mapping[str, Spent]]
    """By side and stage, per GB."""

    @property
    def bytes_share(self) -> float:
        return (self.bytes_pushed + self.bytes_pulled) / 2


@contextmanager
def run_of(directory: Path, push: CodecName, pull: CodecName, *, num_islands: int) -> Iterator[Callable[[], Cost]]:
    with ExitStack() as stack:
        options = ("--quorum", str(num_islands), "--pull-codec", pull)
        synchronizer = stack.enter_context(closing(SynchronizerProcess(directory, *options)))
        islands = [
            stack.enter_context(closing(BenchIsland(synchronizer.url, push, slot=slot))) for slot in range(num_islands)
        ]
        threads = stack.enter_context(ThreadPoolExecutor(num_islands))

        def sync_all() -> list[SyncReport]:
            version = islands[0].island.version
            return list(threads.map(lambda island: island.sync(version), islands))

        def measure() -> Cost:
            sync_all()  # memory is touched for the first time
            before_s, before = cpu_s(synchronizer.pid), spent_of(synchronizer)
            reports = [report for _ in range(ROUNDS) for report in sync_all()]
            spent_s, after = cpu_s(synchronizer.pid) - before_s, spent_of(synchronizer)
            assert_same([island.island.global_flat for island in islands])
            assert all(report.state_mismatches == 0 for report in reports)
            num_bytes = 4 * flatten_module(islands[0].island.module).numel()
            return Cost(
                bytes_pushed=statistics.mean(report.bytes_pushed for report in reports) / num_bytes,
                bytes_pulled=statistics.mean(report.bytes_pulled for report in reports) / num_bytes,
                sync_s=statistics.median(report.finished_s - report.started_s for report in reports),
                pushed_s=statistics.median((report.pushed_s or 0.0) - report.started_s for report in reports),
                blocked_s=statistics.median(report.blocked_s or 0.0 for report in reports),
                blocked_share=statistics.median(
                    (report.blocked_s or 0.0) / (report.finished_s - report.started_s) for report in reports
                ),
                gb_per_cpu_s=len(reports) * num_bytes / 1e9 / max(spent_s, 0.01),
                stages=per_gigabyte(before, after, cpu_s=spent_s, gigabytes=len(reports) * num_bytes / 1e9),
            )

        yield measure


def spent_of(synchronizer: SynchronizerProcess) -> dict[str, dict[str, Spent]]:
    """What both sides have taken so far, by stage."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{synchronizer.url}/metrics", trust_env=False).text):
        for sample in family.samples:
            if sample.name.startswith("wadiloco_synchronizer_stage_"):
                found.setdefault(sample.labels["stage"], {})[sample.name] = sample.value
    cpu, wall = (f"wadiloco_synchronizer_stage_{name}_total" for name in ("cpu_seconds", "seconds"))
    return {
        "islands": {str(stage): spent for stage, spent in STAGES.spent().items() if spent.wall_s},
        "synchronizer": {stage: Spent(times[cpu], times[wall]) for stage, times in found.items()},
    }


def per_gigabyte(
    before: Mapping[str, Mapping[str, Spent]],
    after: Mapping[str, Mapping[str, Spent]],
    *,
    cpu_s: float,
    gigabytes: float,
) -> dict[str, dict[str, Spent]]:
    taken = {
        side: {stage: spent - before[side].get(stage, Spent()) for stage, spent in stages.items()}
        for side, stages in after.items()
    }
    known_s = sum(spent.cpu_s for spent in taken["synchronizer"].values())
    taken["synchronizer"]["http"] = Spent(cpu_s - known_s)
    return {
        side: {stage: Spent(spent.cpu_s / gigabytes, spent.wall_s / gigabytes) for stage, spent in stages.items()}
        for side, stages in taken.items()
    }


def print_stages(stages: Mapping[str, Mapping[str, Spent]]) -> None:
    for side, times in stages.items():
        columns = {stage: spent for stage, spent in times.items() if spent.cpu_s >= 0.0005}
        total_s = sum(spent.cpu_s for spent in columns.values())
        print(f"  {side + ', s/GB':>19} {'all':>8}" + "".join(f"{stage:>8}" for stage in columns))
        print(f"  {'CPU':>19} {total_s:8.2f}" + "".join(f"{spent.cpu_s:8.2f}" for spent in columns.values()))
        print(
            f"  {'wall':>19} {'':8}"
            + "".join(f"{spent.wall_s:8.2f}" if spent.wall_s else f"{'':8}" for spent in columns.values())
        )


def assert_same(vectors: list[Tensor]) -> None:
    assert all(torch.equal(vector.view(torch.int32), vectors[0].view(torch.int32)) for vector in vectors)


def runs() -> list[tuple[int, CodecName, CodecName]]:
    given = os.environ.get("BENCH_OUTER_SYNC_RUNS")
    if given is None:
        return [(num_islands, *pair) for num_islands in (2, 4) for pair in PAIRS]
    words = [word.split(":") for word in given.split()]
    return [(int(number), codec_named(push).name, codec_named(pull).name) for number, push, pull in words]


def test_what_an_outer_sync_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    costs: dict[tuple[int, CodecName, CodecName], Cost] = {}
    with capsys.disabled():
        print(f"\n{SIZE:,} parameters, {ROUNDS} rounds after one that is not counted")
        print(
            f"{'islands':>7} {'push':>5} {'pull':>5} {'bytes':>7} {'pushed':>7} {'pulled':>7} "
            f"{'sync s':>7} {'push s':>7} {'blocked ms':>10} {'blocked':>8} {'GB/s/core':>10}"
        )
        for num_islands, push, pull in runs():
            directory = tmp_path / f"{num_islands}-{push}-{pull}"
            with run_of(directory, push, pull, num_islands=num_islands) as measure:
                cost = costs[num_islands, push, pull] = measure()
            for path in directory.iterdir():
                path.unlink()
            print(
                f"{num_islands:7} {push:>5} {pull:>5} {cost.bytes_share:7.1%} {cost.bytes_pushed:7.1%} "
                f"{cost.bytes_pulled:7.1%} {cost.sync_s:7.2f} {cost.pushed_s:7.2f} {1e3 * cost.blocked_s:10.1f} "
                f"{cost.blocked_share:8.1%} {cost.gb_per_cpu_s:10.2f}"
            )
            print_stages(cost.stages)
    for (_, push, pull), cost in costs.items():
        assert cost.bytes_share <= (MAX_SHARE if (push, pull) == ("int4", "int4") else 1.0)
        assert cost.blocked_share < 0.5
