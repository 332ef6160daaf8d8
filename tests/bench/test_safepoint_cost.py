"""What safepoints cost a step while the gate is open: ``make bench``.

Steps of the default model with the safepoints that the worker gives it and without, in turns; compared is the CPU time
of the thread, step against step, so that whoever shares the core does not count.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from diloco.inner import InnerConfig, InnerLoop
from diloco.model import VOCAB_SIZE, ModelSize, build_model
from diloco.safepoint import Safepoint, hooked, layers_of, open_gate, spaced_out
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.records import SlotFlag

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

PAIRS = 60
WARM_UP = 5


def thread_ms(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started_s)


def test_what_open_safepoints_cost(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    size = ModelSize()
    model = build_model(size, seed=0)
    loop = InnerLoop(model, InnerConfig())
    batch = torch.randint(0, VOCAB_SIZE, (4, size.context + 1))
    writer = GateWriter(tmp_path, SlotFlag.INGRESS)
    safepoint = Safepoint(open_gate(tmp_path))
    step_ms = min(thread_ms(lambda: loop.take_step(batch)) for _ in range(WARM_UP))
    layers = spaced_out(layers_of(model), step_ms / 1e3)

    def one_step(hooks: Callable[[], AbstractContextManager[object]]) -> float:
        writer.beat()
        with hooks():
            return thread_ms(lambda: loop.take_step(batch))

    plain, gated = [], []
    for _ in range(PAIRS):
        plain.append(one_step(contextlib.nullcontext))
        gated.append(one_step(lambda: hooked(layers, safepoint)))
    writer.close()
    assert safepoint.yielded.times == 0
    ratios = [with_ / without for with_, without in zip(gated, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"\n{PAIRS} pairs of steps of {statistics.median(plain):.1f} ms, {len(layers)} hooked layers\n"
        f"CPU time with / without: median {middle:.4f}, quartiles {low:.4f} to {high:.4f}"
    )
