"""What the agent tells CUDA of its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from diloco.agent.config import IslandSettings
from diloco.agent.dry_run import worker_config
from diloco.agent.process import WorkerProcess, gpu_environment

COMPLETE: dict[str, Any] = {"slot": 0, "synchronizer": "http://127.0.0.1:9"}


def environment(**settings: Any) -> dict[str, str]:
    return gpu_environment(worker_config(IslandSettings(**COMPLETE, **settings)))


def test_an_idle_worker_is_below_normal_under_mps_and_has_the_share_that_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_MPS_CLIENT_PRIORITY", raising=False)
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    assert environment() == {"CUDA_MPS_CLIENT_PRIORITY": "1"}
    assert environment(mps_thread_percentage=30) == {"CUDA_MPS_CLIENT_PRIORITY": "1"} | share
    assert environment(mps_thread_percentage=30, idle_priority=False) == share
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "0")
    assert environment() == {"CUDA_MPS_CLIENT_PRIORITY": "0"}


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc on this platform")
def test_the_worker_has_it_before_cuda_can_look() -> None:
    config = worker_config(IslandSettings(**COMPLETE, mps_thread_percentage=30))

    async def started_with() -> bytes:
        worker = await WorkerProcess.start(config)
        try:
            return environ_of(worker.pid)
        finally:
            await worker.end(0.0)

    assert b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30\0" in asyncio.run(started_with())


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:1 "])
def test_devices_of_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        IslandSettings(**COMPLETE, device=name)


@pytest.mark.parametrize("share", [0, 101])
def test_shares_beyond_a_percentage_are_refused(share: int) -> None:
    with pytest.raises(ValidationError, match="mps_thread_percentage"):
        IslandSettings(**COMPLETE, mps_thread_percentage=share)
