"""What low communication costs in loss and saves in bytes, and how long a round takes: ``make bench-train``.

Loss at equal tokens: a small GPT on the real text of this Python installation's library, two islands, equal batches in
equal order (see ``local_rounds``). What is compared is the loss on a held-out shard at the end: of plain data parallel,
which communicates at every step; of synchronous DiLoCo in fp32; of the same with int4 contributions and error feedback;
of int4 overlapped, whose result is applied so many steps after the push; and of the same in fragments that sync one
after another, each every H steps. The spread is the standard deviation over
seeds; the difference is the mean over seeds of the paired ones, with its own spread, so that a seed that is bad for all
is bad for none. The inner learning rate was chosen from a grid, see `INNER_LR`; outer learning rate and momentum are
the paper's, 0.7 and 0.9.

Beside torchft: the same task (``tests.diloco.parity``) under torchft's DiLoCo and under the library, in processes on
loopback, in turns so that a busy moment hits both. A round's time is that of the step that syncs: what an island waits
for the sync, the slower island counting. Bytes are those of one island, a mean; torchft's are what its process writes,
and what all islands send in an all-reduce is what all receive. torchft's quantised all-reduce needs CUDA, and is not
compared. On loopback a byte costs next to nothing: what is seen there is the cost of all else, on our side digests, two
more hops, and every generation on disk before anybody sees it.

    BENCH_TRAIN='STEPS H SEEDS WARM WIDTH'      by default 1500 30 3 420 128: 45,000 steps of 22 ms of CPU, 10 minutes
                                                on two quiet cores (an estimate); the first WARM steps are data parallel
    BENCH_TRAIN_SIDE='WIDTH LAYERS ROUNDS RUNS' by default 640 4 6 3: 20 million parameters, 4 minutes or so
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from diloco.schema import CodecName
from tests.bench.local_rounds import Result, Setting, run
from tests.diloco.conftest import REPOSITORY
from tests.diloco.parity import Task
from tests.diloco.test_parity import needs_torchft

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

PLAIN, FP32, INT4, OVERLAPPED = "data parallel", "DiLoCo fp32", "DiLoCo int4", "DiLoCo int4 overlapped"
NUM_FRAGMENTS = 4
STREAMING = f"the same, {NUM_FRAGMENTS} fragments"
INNER_LR, TUNED_WIDTH = 4e-3, 64
"""Best of 2e-3, 4e-3 and 8e-3 both for data parallel and for DiLoCo (1000 steps, H 20, 280 together, width 64, first
seed); for another width in inverse proportion, which keeps the size of an Adam update's effect."""
METHODS = (PLAIN, FP32, INT4, OVERLAPPED, STREAMING)
OVERLAP_FRAC = 1 / 6
"""Of H: the steps between the push and its result."""
CORES = min(2, os.cpu_count() or 1)


def settings(num_steps: int, sync_every: int, num_seeds: int, warm_steps: int, width: int) -> list[Setting]:
    overlap_steps = max(round(OVERLAP_FRAC * sync_every), 1)

    def setting(
        method: str, seed: int, *, h: int = 0, codec: CodecName = "fp32", overlap: int = 0, fragments: int = 1
    ) -> Setting:
        return Setting(
            method=method,
            seed=seed,
            num_steps=num_steps,
            inner_lr=INNER_LR * TUNED_WIDTH / width,
            width=width,
            sync_every=h,
            warm_steps=warm_steps if h else 0,
            codec=codec,
            overlap_steps=overlap,
            num_fragments=fragments,
        )

    made = []
    for seed in range(num_seeds):
        made.append(setting(PLAIN, seed))
        made.append(setting(FP32, seed, h=sync_every))
        made.append(setting(INT4, seed, h=sync_every, codec="int4"))
        overlapped = partial(setting, seed=seed, h=sync_every, codec="int4", overlap=overlap_steps)
        made += [overlapped(OVERLAPPED), overlapped(STREAMING, fragments=NUM_FRAGMENTS)]
    return made


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def differences(results: Sequence[Result], method: str, against: str) -> list[float]:
    """In percent, by seed."""
    loss = {(result.setting.method, result.setting.seed): result.loss for result in results}
    seeds = sorted({result.setting.seed for result in results})
    return [100 * (loss[method, seed] / loss[against, seed] - 1) for seed in seeds]


def shown(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):+6.2f} ± {spread(values):4.2f} %"


def print_losses(results: Sequence[Result], sync_every: int) -> None:
    setting = results[0].setting
    warm = max(result.setting.warm_steps for result in results)
    tokens = 2 * setting.num_steps * setting.batch_size * setting.size.context
    print(f"\n{setting.num_steps} steps of 2 islands, {tokens:,} bytes of text, H {sync_every}, first {warm} together")
    print(
        f"{'':24}{'inner lr':>9}{'loss':>17}{'train':>8}{'to data parallel':>20}{'to DiLoCo fp32':>20}"
        f"{'sent':>15}{'at once':>12}"
    )
    for method in METHODS:
        mine = [result for result in results if result.setting.method == method]
        losses = [result.loss for result in mine]
        loss = f"{statistics.mean(losses):.4f} ± {spread(losses):.4f}"
        train_loss = statistics.mean(result.train_loss for result in mine)
        per_step = mine[0].bytes_per_round / sync_every
        print(
            f"{method:24}{mine[0].setting.inner_lr:9.0e}{loss:>17}{train_loss:8.4f}"
            f"{shown(differences(results, method, PLAIN)):>20}{shown(differences(results, method, FP32)):>20}"
            f"{f'{per_step:,.0f} B' if per_step else 'all gradients':>15}{f'{mine[0].bytes_at_once:,}':>12}"
        )
    print(
        "loss: held-out, nats per byte, mean ± standard deviation over seeds; "
        "sent: by one island, per inner step; at once: in one sync"
    )


def test_loss_at_equal_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    sizes_given = os.environ.get("BENCH_TRAIN", "1500 30 3 420 128").split()
    num_steps, sync_every, num_seeds, warm_steps, width = (int(part) for part in sizes_given)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(CORES, mp_context=context) as pool:
        results = list(pool.map(run, settings(num_steps, sync_every, num_seeds, warm_steps, width)))
    with capsys.disabled():
        print_losses(results, sync_every)
    sizes = {result.setting.method: result.bytes_per_round for result in results}
    assert 7 * sizes[INT4] <= sizes[FP32]


def measured(module: str, task: Task, out: Path, *options: str) -> dict[str, list[float]]:
    """Times and bytes of each round but the first, whose connections are new."""
    out.mkdir(parents=True)
    with (out / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", module, *task.arguments(), "--out", str(out), *options],
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            timeout=600,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        )
    assert done.returncode == 0, (out / "log").read_text()[-3000:]
    islands = [json.loads((out / f"island-{slot}.json").read_text()) for slot in range(task.num_islands)]
    rounds = range(1, task.num_rounds)
    plain = statistics.median(time for island in islands for time in island["step_s"])
    return {
        "sync_s": [max(island["sync_s"][index] for island in islands) - plain for index in rounds],
        "sent": [statistics.mean(island["sent"][index] for island in islands) for index in rounds],
        "received": [statistics.mean(island["received"][index] for island in islands) for index in rounds],
    }


@needs_torchft
def test_rounds_beside_those_of_torchft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    width, layers, rounds, runs = (int(part) for part in os.environ.get("BENCH_TRAIN_SIDE", "640 4 6 3").split())
    task = Task(width=width, num_layers=layers, num_rounds=rounds, sync_every=3, context=32)
    sides = {
        "torchft fp32": ("tests.diloco.torchft_islands", ()),
        "library fp32": ("tests.diloco.library_islands", ()),
        "library int4": ("tests.diloco.library_islands", ("--codec", "int4")),
    }
    seen: dict[str, dict[str, list[float]]] = {name: {"sync_s": [], "sent": [], "received": []} for name in sides}
    for number in range(runs):
        for name, (module, options) in sides.items():
            found = measured(module, task, tmp_path / f"{number}-{name}".replace(" ", "-"), *options)
            for key, values in found.items():
                seen[name][key] += values
    with capsys.disabled():
        print(f"\n2 islands, width {width}, {layers} layers, {runs} runs of {rounds - 1} rounds in turns")
        print(f"{'':14}{'s per round, median (quartiles)':>34}{'of torchft':>12}{'bytes sent':>14}{'received':>14}")
        base = statistics.median(seen["torchft fp32"]["sync_s"])
        for name, found in seen.items():
            low, middle, high = statistics.quantiles(found["sync_s"], n=4)
            times = f"{middle:.3f} ({low:.3f} to {high:.3f})"
            print(
                f"{name:14}{times:>34}{middle / base:12.2f}"
                f"{statistics.median(found['sent']):14,.0f}{statistics.median(found['received']):14,.0f}"
            )
