"""Transfers that wait for lulls: how long at most, and what ends a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.lull import MARGIN, POLL_S, SHARE, Lulls, longest_wait_s
from diloco.schema import CHUNK_BYTES, Manifest, TensorSpec
from diloco.transport import SynchronizerClient
from service.errors import UnavailableError

Serve = Callable[..., str]
SECONDS = st.floats(0.0, 1e4)


@dataclass(frozen=True)
class State:
    busy: bool


class ScriptedGate:
    """Busy until some time on a clock that only pauses move, by more than they were asked for."""

    def __init__(self, busy_until_s: float, *, stall_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._busy_until_s = busy_until_s
        self._stall_s = stall_s

    def read(self, now_s: float) -> State:
        return State(now_s < self._busy_until_s)

    def pause(self, duration_s: float) -> bool:
        self.now_s += duration_s + self._stall_s
        return False


@given(left_s=SECONDS, later_s=SECONDS, num_chunks=st.integers(1, 1000), chunk_s=st.none() | SECONDS)
def test_the_later_it_is_the_less_it_waits(
    left_s: float, later_s: float, num_chunks: int, chunk_s: float | None
) -> None:
    now = longest_wait_s(left_s, num_chunks=num_chunks, chunk_s=chunk_s)
    then = longest_wait_s(left_s - later_s, num_chunks=num_chunks, chunk_s=chunk_s)
    assert 0.0 <= then <= now <= SHARE * left_s


@given(left_s=SECONDS, num_chunks=st.integers(1, 200), chunk_s=SECONDS)
def test_waiting_alone_never_costs_the_deadline(left_s: float, num_chunks: int, chunk_s: float) -> None:
    in_time = MARGIN * num_chunks * chunk_s <= left_s
    for chunks_left in range(num_chunks, 0, -1):
        left_s -= longest_wait_s(left_s, num_chunks=chunks_left, chunk_s=chunk_s) + chunk_s
    assert left_s >= -1e-6 or not in_time


def test_no_time_is_no_wait() -> None:
    assert longest_wait_s(0.0, num_chunks=3, chunk_s=None) == 0.0
    assert longest_wait_s(10.0, num_chunks=5, chunk_s=1.0) == 0.0
    assert longest_wait_s(-1.0, num_chunks=0, chunk_s=0.1) == 0.0


@pytest.mark.parametrize(("busy_s", "waited_s"), [(0.0, 0.0), (0.5, 0.5), (9.0, 2.0)])
def test_a_lull_or_the_time_ends_a_wait(busy_s: float, waited_s: float) -> None:
    gate = ScriptedGate(busy_s)
    lulls = Lulls(gate, clock=lambda: gate.now_s)
    lulls.wait(2.0, pause=gate.pause)
    assert gate.now_s == lulls.waited_s == pytest.approx(waited_s, abs=2 * POLL_S)


def test_a_machine_that_stands_still_is_not_waited_for_again() -> None:
    gate = ScriptedGate(9.0, stall_s=3.0)
    Lulls(gate, clock=lambda: gate.now_s).wait(2.0, pause=gate.pause)
    assert gate.now_s < 3.1


class Gate:
    """A gate that the test opens, and that sees what goes past it."""

    def __init__(self) -> None:
        self.busy = True
        self.asked = threading.Event()
        self.num_reads = 0

    def read(self, now_s: float) -> State:
        self.num_reads += 1
        self.asked.set()
        return State(self.busy)


SIZE = CHUNK_BYTES // 4 + 100
"""Values of two chunks."""
MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(SIZE,), dtype="float32"),))


def test_uploads_and_downloads_ask_before_every_chunk_and_go_on_in_a_lull(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1)
    gate = Gate()
    lulls = Lulls(gate, clock=time.monotonic)
    client = SynchronizerClient(httpx.Client(base_url=url, timeout=30, trust_env=False), lulls=lulls)

    def open_gate() -> None:
        gate.asked.wait()
        gate.busy = False

    opener = threading.Thread(target=open_gate)
    opener.start()
    deadline_s = time.time() + 600
    client.init(MANIFEST, torch.zeros(SIZE), deadline_s=deadline_s)
    opener.join()
    assert lulls.waited_s > 0.0
    assert gate.num_reads >= 3
    before = gate.num_reads
    client.push(torch.ones(SIZE), round=0, slot=0, epoch=0, tokens=1, deadline_s=deadline_s)
    assert gate.num_reads == before + 2
    client.wait_version(0, deadline_s=deadline_s)
    client.pull(1, torch.empty(SIZE), deadline_s=deadline_s)
    assert gate.num_reads == before + 4
    client.close()


def test_a_server_that_never_rests_does_not_keep_a_transfer_from_its_deadline(serve: Serve, tmp_path: Path) -> None:
    client = SynchronizerClient(
        httpx.Client(base_url=serve(tmp_path, quorum=1), timeout=30, trust_env=False),
        lulls=Lulls(Gate(), clock=time.monotonic),
    )
    started_s = time.time()
    deadline_s = started_s + 40.0
    client.init(MANIFEST, torch.zeros(SIZE), deadline_s=deadline_s)
    reply = client.push(
        torch.ones(SIZE), round=0, slot=0, epoch=0, tokens=1, deadline_s=deadline_s, close_by_s=started_s + 20.0
    )
    assert reply.complete
    assert time.time() < deadline_s
    client.close()


def test_a_stop_ends_a_wait_for_a_lull(serve: Serve, tmp_path: Path) -> None:
    gate = Gate()
    client = SynchronizerClient(
        httpx.Client(base_url=serve(tmp_path, quorum=1), timeout=30, trust_env=False),
        lulls=Lulls(gate, clock=time.monotonic),
    )

    def stop() -> None:
        gate.asked.wait()
        client.cancel()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(UnavailableError, match="cancelled"):
        client.init(MANIFEST, torch.zeros(SIZE), deadline_s=time.time() + 3600)
    stopper.join()
    client.close()
