"""Two rank workers of one island as real processes, which carry the chunks of its syncs together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from diloco.protocol import FailedEvent, GroupPlace, SyncCommand, SyncedEvent
from diloco.schema import CHUNK_BYTES, SyncOutcome
from diloco.transport import SynchronizerClient
from tests.diloco.test_worker import DEADLINE_S, Start, WorkerUnderTest, start
from tests.diloco.test_worker_ranks import TIMEOUT_S, stop

__all__ = ["start"]

pytestmark = pytest.mark.integration

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]
SHAPE = {"width": 512, "batch_size": 2}
"""Of a model of four chunks as fp32."""


def start_pair(start: Start, store_url: str, *urls: str, **overrides: Any) -> tuple[WorkerUnderTest, WorkerUnderTest]:
    place = GroupPlace(store_url=store_url, store_token=SecretStr("any"), name="slot-0", epoch=1, timeout_s=TIMEOUT_S)
    first, second = (
        start(url, rank=rank, num_ranks=2, group=place, **SHAPE | overrides) for rank, url in enumerate(urls)
    )
    return first, second


def sockets_to(pid: int, port: int) -> int:
    """Connections of a process to that port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if int(row[2].rpartition(":")[2], 16) == port}
    links = (str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return sum(link.removeprefix("socket:[").rstrip("]") in inodes for link in links if link.startswith("socket:["))


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "beside-steps"])
def test_both_ranks_talk_to_the_synchronizer_and_end_with_the_same(
    serve: Serve, connect: Connect, start: Start, store_url: str, tmp_path: Path, overlap: bool
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    first, second = start_pair(start, store_url, url, url)
    first.progress(lambda p: p.step > 2)
    # Two syncs: the second one begins with a comparison of what the ranks adopted in the first.
    for number in range(2):
        seen = len(first.events)
        first.send(SyncCommand(round=number, epoch=1, deadline_s=time.time() + DEADLINE_S, overlap=overlap))
        report = first.wait_for(SyncedEvent, after=seen).report
        assert (report.outcome, report.round) == (SyncOutcome.APPLIED, number)
        assert report.bytes_pushed == report.bytes_pulled > 3 * CHUNK_BYTES
    port = int(url.rpartition(":")[2])
    assert sockets_to(first.process.pid, port) >= 1
    assert sockets_to(second.process.pid, port) >= 1, "it carried chunks"
    flat = torch.empty(report.bytes_pulled // 4)
    assert connect(url).pull(2, flat, deadline_s=time.time() + DEADLINE_S) == 2
    assert not any(isinstance(event, FailedEvent) for event in (*first.events, *second.events))
    stop(first, second)


def test_a_sync_fails_with_the_reason_for_both_when_one_cannot_carry_its_share_and_they_train_on(
    serve: Serve, start: Start, store_url: str, tmp_path: Path
) -> None:
    first, second = start_pair(start, store_url, serve(tmp_path / "sync", quorum=1), "http://127.0.0.1:9")
    before = first.progress(lambda p: p.step > 2)
    report = first.sync(0, deadline_in_s=8.0)
    assert report.outcome is SyncOutcome.FAILED
    assert "http://127.0.0.1:9: deadline passed: ConnectError" in report.detail
    first.progress(lambda p: p.step > before.step + 2)
    assert not any(isinstance(event, FailedEvent) for event in (*first.events, *second.events))
    stop(first, second)
