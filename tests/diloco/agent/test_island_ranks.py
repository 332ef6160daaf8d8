"""An island of two ranks under one agent: it syncs, waits for its server, and survives the death of either rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.schema import Phase, Progress
from sidecar.vllm_plugin.gate_writer import GateWriter, Heartbeat
from sidecar.vllm_plugin.records import SlotFlag
from tests.diloco.agent.test_island_alone import alone, is_alive

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]

RunIsland = Callable[..., Any]
Serve = Callable[..., str]
TOKENS_PER_STEP = 64


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[GateWriter]:
    writer = GateWriter(tmp_path / "gate", SlotFlag.INGRESS)
    heartbeat = Heartbeat()
    heartbeat.add(writer.beat)
    yield writer
    heartbeat.stop()
    writer.close()


def no_steps_lost(progress: Progress) -> bool:
    return progress.tokens == progress.step * TOKENS_PER_STEP


def trains(progress: Progress) -> bool:
    return progress.phase is Phase.INNER and progress.inner_steps_since_sync > 0


@pytest.mark.parametrize("options", [(), ("--shard-optimizer",)], ids=["whole", "sharded"])
def test_two_ranks_train_and_sync_and_stop_in_order(
    serve: Serve, run_island: RunIsland, tmp_path: Path, options: tuple[str, ...]
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    island = run_island(*alone(url), "--ranks", "2", *options)
    pids = island.until_status(lambda s: s.worker_ready).worker_pids
    assert len(set(pids)) == 2
    synced = island.until_progress(lambda p: p.round >= 1 and trains(p))
    assert no_steps_lost(synced)
    assert synced.loss is not None
    assert synced.loss < 5.0
    assert 'syncs_total{outcome="applied"} 1.0' in island.get("/metrics").text
    assert island.terminate() == 0
    assert not any(map(is_alive, pids))
    assert island.log().count("code=0 why=stopped") == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_rank_is_killed_the_island_trains_again_by_itself(
    serve: Serve, run_island: RunIsland, tmp_path: Path, rank: int
) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--ranks", "2")
    pids = island.until_status(lambda s: s.worker_ready).worker_pids
    before = island.until_progress(lambda p: p.step > 20)
    os.kill(pids[rank], signal.SIGKILL)
    status = island.until_status(lambda s: s.worker_ready and not set(s.worker_pids) & set(pids))
    assert status.restarts == 1
    after = island.until_progress(lambda p: trains(p) and p.step > before.step)
    assert no_steps_lost(after)
    assert not any(map(is_alive, pids))


def test_a_closed_gate_outlasts_the_groups_timeout_and_ranks_stop_behind_it(
    serve: Serve, run_island: RunIsland, tmp_path: Path, gate: GateWriter
) -> None:
    timeout_s = 3.0
    options = ("--ranks", "2", "--gate", str(tmp_path / "gate"), "--group-timeout-s", str(timeout_s))
    island = run_island(*alone(serve(tmp_path / "sync")), *options)
    island.until_progress(lambda p: p.step > 5)
    gate.update(in_flight=1)
    held = island.until_progress(lambda p: p.yield_reason == "in_flight")
    waited_s = held.yielded_s or 0.0
    held = island.until_progress(lambda p: (p.yielded_s or 0.0) > waited_s + 2 * timeout_s)
    gate.update(in_flight=0)
    island.until_progress(lambda p: p.step > held.step + 5)
    gate.update(in_flight=1)
    island.until_progress(lambda p: p.yield_reason == "in_flight")
    assert island.status().restarts == 0
    assert island.terminate() == 0
    assert island.log().count("code=0 why=stopped") == 2


def test_a_killed_agent_takes_all_ranks_along(serve: Serve, run_island: RunIsland, tmp_path: Path) -> None:
    island = run_island(*alone(serve(tmp_path / "sync")), "--ranks", "2")
    pids = island.until_status(lambda s: s.worker_ready).worker_pids
    island.kill()
    assert not any(map(is_alive, pids))
