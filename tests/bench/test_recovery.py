"""What the death of a process costs, and what it costs to be ready for it: ``make bench-recovery``.

Real processes (controller, synchronizer, agents, workers), killed one after another when all is ready for it. Times
are those from the kill on; phases are the controller's (docs/recovery.md), read from one clock:

    detect      kill → the loss is seen              fetch       → its state is on its host, and whole
    fence       → a new holder, in a new epoch       load        → the worker has it
                                                     first step  → the first inner step is done

``new step`` is when the slot was seen beyond all that it had shown, which islands tell twice a second. The others' gap
is the longest time between two such reports of the other islands, from the kill to one second after the recovery,
against that in an equally long time before it: the same reports, so that their interval is in both. Memory is that of
the worker, shared memory included: most that the next one had taken at its first step, over what the dead one had.
What else runs on the machine counts in all of these.

An island is killed whole when its spare has a replica that is newer than the last sync: with an older one it goes on
from global parameters (docs/recovery.md). In a synchronous run the others wait for the slot where a round closes
meanwhile: that is in the gap, too.

    BENCH_RECOVERY='KILLS MILLIONS'     kills of each kind, and parameters; by default 10 20: half an hour or so
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from diloco.agent.vaults import SHARED_MEMORY
from diloco.model import ModelSize, build_model, count_parameters
from replay.chaos.config import ChaosSettings
from replay.summarize import this_machine
from tests.bench.recovery_fleet import PHASES, Ordeal, running_fleet
from tests.bench.snapshot_cost import measure_snapshots

pytestmark = [pytest.mark.bench, pytest.mark.integration, pytest.mark.timeout(7200)]

NUM_LAYERS, CONTEXT, HEAD = 4, 32, 32
FAILURE_TIMEOUT_S = 3.0
DETAIL = 120
"""Characters of a cause that are shown."""
WORKER, ISLAND, RANK, STOPPED = "worker, own host", "island, spare", "rank of two", "worker stopped"


def sizes() -> tuple[int, ModelSize]:
    """Kills of each kind, and the model."""
    kills, millions = os.environ.get("BENCH_RECOVERY", "10 20").split()
    # A block has about 12 width² parameters.
    width = max(HEAD, HEAD * round((float(millions) * 1e6 / (12 * NUM_LAYERS)) ** 0.5 / HEAD))
    return int(kills), ModelSize(num_layers=NUM_LAYERS, num_heads=width // HEAD, width=width, context=CONTEXT)


@pytest.fixture
def shared_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in it, which nothing outlives."""
    shm = SHARED_MEMORY if SHARED_MEMORY.is_dir() else tmp_path
    with tempfile.TemporaryDirectory(prefix="wadiloco-bench-", dir=shm) as made:
        yield Path(made)


def settings_of(out: Path, size: ModelSize, *, islands: int, spares: int, ranks: int) -> ChaosSettings:
    train = {
        "num_layers": size.num_layers,
        "num_heads": size.num_heads,
        "width": size.width,
        "context": size.context,
        "batch_size": ranks,
        "data_shards": islands,
        "failure_timeout_s": FAILURE_TIMEOUT_S,
    }
    return ChaosSettings(
        out=out,
        islands=islands,
        spares=spares,
        ranks=ranks,
        sync_every=100,
        lease_timeout_s=20.0,
        liveness_s=60.0,
        train_options={name: str(value) for name, value in train.items()},
        ports="23000-23099",
    )


def spread(values: Sequence[float], *, digits: int = 2) -> str:
    """Median, 95th percentile and worst."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return f"{statistics.median(ordered):.{digits}f} / {p95:.{digits}f} / {ordered[-1]:.{digits}f}"


def print_kind(name: str, ordeals: Sequence[Ordeal]) -> None:
    print(f"\n{name}, {len(ordeals)} times")
    for ordeal in ordeals:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in zip(PHASES, ordeal.phases, strict=True))
        print(
            f"  first step after {ordeal.first_step_s:.2f} s ({phases}), new step {ordeal.new_step_s:.2f} s,"
            f" {ordeal.rung}, steps lost {ordeal.steps_lost}: {ordeal.detail[:DETAIL]}"
        )
    for index, phase in enumerate(PHASES):
        print(f"    {phase:14}{spread([each.phases[index] for each in ordeals]):>28} s")
    rows = {
        "first step": spread([each.first_step_s for each in ordeals]) + " s",
        "new step": spread([each.new_step_s for each in ordeals]) + " s",
        "steps lost": spread([each.steps_lost for each in ordeals], digits=0),
    }
    gaps = [
        (each.others_gap_s, each.others_normal_gap_s)
        for each in ordeals
        if each.others_gap_s is not None and each.others_normal_gap_s
    ]
    if gaps:
        rows["others' gap"] = spread([gap for gap, _ in gaps]) + " s"
        rows["  normally"] = spread([normal for _, normal in gaps]) + " s"
        rows["  of that"] = spread([gap / normal for gap, normal in gaps])
    memory = [(each.restored_mb, each.steady_mb) for each in ordeals if each.restored_mb and each.steady_mb]
    if memory:
        rows["memory, most"] = spread([most for most, _ in memory], digits=0) + " MB"
        rows["  of steady"] = spread([most / steady for most, steady in memory])
    for title, text in rows.items():
        print(f"    {title:14}{text:>30}")


def print_head(what: str, size: ModelSize) -> None:
    machine = this_machine()
    load = os.getloadavg()[0]
    print(
        f"\n{what}: {count_parameters(build_model(size, seed=0)):,} parameters, {machine.cpu_count} cores"
        f" ({machine.cpu_model or 'unknown'}), {(machine.memory_bytes or 0) / 1e9:.0f} GB, load {load:.1f} before it"
        "\nmedian / 95th percentile / worst"
    )


def test_islands_and_workers_that_die(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills, size = sizes()
    with capsys.disabled():
        print_head("two islands of one rank, one spare", size)

    async def run() -> tuple[dict[str, list[Ordeal]], float]:
        found: dict[str, list[Ordeal]] = {WORKER: [], ISLAND: [], STOPPED: []}
        settings = settings_of(tmp_path / "out", size, islands=2, spares=1, ranks=1)
        async with running_fleet(settings) as fleet:
            for number in range(kills):
                # In turns, so that a busy moment hits all.
                found[WORKER].append(await fleet.kill_worker(number % 2))
                found[ISLAND].append(await fleet.kill_island())
                found[STOPPED].append(await fleet.kill_worker(number % 2, number=signal.SIGSTOP))
            return found, fleet.goodput_frac()

    found, goodput = asyncio.run(run())
    with capsys.disabled():
        for name, ordeals in found.items():
            print_kind(name, ordeals)
        over = [ordeal.first_step_s / FAILURE_TIMEOUT_S for ordeal in found[STOPPED]]
        print(f"    of the timeout of {FAILURE_TIMEOUT_S:g} s: {spread(over)}")
        print(f"\ngoodput {100 * goodput:.1f} % of the time, with a death of some kind every few seconds")
    assert {ordeal.rung for ordeal in found[WORKER] + found[STOPPED]} == {"vault"}
    assert {ordeal.rung for ordeal in found[ISLAND]} == {"replica"}


def test_a_rank_that_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills, size = sizes()
    with capsys.disabled():
        print_head("one island of two ranks", size)

    async def run() -> tuple[list[Ordeal], float]:
        settings = settings_of(tmp_path / "out", size, islands=1, spares=0, ranks=2)
        async with running_fleet(settings) as fleet:
            ordeals = [await fleet.kill_worker(0, rank=number % 2) for number in range(kills)]
            return ordeals, fleet.goodput_frac()

    ordeals, goodput = asyncio.run(run())
    with capsys.disabled():
        print_kind(RANK, ordeals)
        print(f"\ngoodput {100 * goodput:.1f} % of the time")
    assert {ordeal.rung for ordeal in ordeals} == {"vault"}


def test_what_snapshots_cost(tmp_path: Path, shared_memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills, size = sizes()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    with capsys.disabled():
        print_head("snapshots", size)
    cost = measure_snapshots(size, corpus, shared_memory, num_pairs=kills)
    with capsys.disabled():
        print(f"    every {cost.interval} steps of {1e3 * cost.step_s:.0f} ms")
        print(f"    step time, with over without      {spread(cost.ratios, digits=4)}")
        print(f"    processor time, with over without {spread(cost.cpu_ratios, digits=4)}")
    assert len(cost.ratios) == kills
