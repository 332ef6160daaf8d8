"""What a tick of the controller costs: 1,000 islands and 1,000 servers in per_island mode, no news of load or cost.

Those come in `test_controller`.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from pathlib import Path

import pytest

from controller.config import ControllerSettings
from controller.heap import spare_heap
from controller.schema import Mode
from tests.controller.helpers import EPOCH_0, Client, ManualClock, make_settings, progress, running, sample

pytestmark = pytest.mark.bench

NUM_ISLANDS = 1000
NUM_SERVERS = 1000
NUM_TICKS = 600
STEP_S = 0.02
"""Between two ticks: the samples stay fresh, and the round open."""
LIMIT_S = 0.050


def settings(directory: Path, policy: str) -> ControllerSettings:
    return make_settings(
        directory,
        num_slots=NUM_ISLANDS,
        mode=Mode.PER_ISLAND,
        policy=policy,
        min_h=10,
        max_h=400,
        tick_s=10.0,  # the ticks are ours
        stale_after_s=20.0,
        sync_timeout_s=60.0,
        lease_timeout_s=600.0,
        # wa_diloco never comes here, whatever it is worth; the gate lets all islands in at once.
        policy_params={"threshold": 0.9},
    )


async def fill(client: Client, clock: ManualClock) -> None:
    """Every island has a lease and progress, every server a sample."""
    for index in range(NUM_ISLANDS):
        await client.register(f"island-{index}", node=f"host-{index}")
    batch = [
        sample(f"vllm-{index}", node=f"host-{index}", t_s=clock.now_s, pressure_frac=0.5)
        for index in range(NUM_SERVERS)
    ]
    answer = await client.http.post("/v1/samples", json={"samples": batch})
    assert answer.json()["accepted"] == NUM_SERVERS
    await report_all(client, h=50)


async def report_all(client: Client, *, h: int) -> None:
    for index in range(NUM_ISLANDS):
        await client.beat(
            f"island-{index}",
            epoch=client.controller.state.registry.epoch - EPOCH_0,
            progress=progress(h + index % 100, step=1000 + h, tokens=10**6, tokens_since_sync=10**5),
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["wa_diloco", "pressure_gate"])
def test_a_tick_of_a_thousand_islands_stays_within_its_share(tmp_path: Path, policy: str) -> None:
    clock = ManualClock()
    cpu_s: list[float] = []
    wall_s: list[float] = []

    async def main() -> None:
        async with running(settings(tmp_path, policy), clock) as client:
            spare_heap()
            await fill(client, clock)
            loop = client.loop
            for _ in range(NUM_TICKS):
                clock.advance(STEP_S)
                began_s, thread_s = time.perf_counter(), time.thread_time()
                await loop.tick()
                wall_s.append(time.perf_counter() - began_s)
                cpu_s.append(time.thread_time() - thread_s)
            assert await client.metric("wadiloco_controller_tick_failures_total") == 0
            rounds = client.controller.state.rounds.entries
            assert [len(entry.told) for entry in rounds] == ([] if policy == "wa_diloco" else [NUM_ISLANDS])

    thresholds = gc.get_threshold()
    try:
        asyncio.run(main())
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    for name, values in (("cpu of the loop", cpu_s), ("wall", wall_s)):
        cuts = statistics.quantiles(values, n=100)
        print(f"{policy}: tick {name}: p50 {1e3 * cuts[49]:.1f} ms, p99 {1e3 * cuts[98]:.1f} ms")
    assert statistics.quantiles(cpu_s, n=100)[98] <= LIMIT_S
