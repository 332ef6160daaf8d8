"""Plugin and middleware in a real vLLM server, with a sidecar and a training worker's reader beside it."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from replay.processes import Children
from sidecar.schema import Load
from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.source.snapshot import EngineSnapshot
from sidecar.source.window import difference
from sidecar.vllm_plugin.gate_reader import GateReason
from sidecar.vllm_plugin.records import GATE_FILE
from tests.integration.helpers import eventually
from tests.integration.servers import LiveServer, LiveSidecar, request

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(600)]


def test_an_idle_server_keeps_its_gate_open(server: LiveServer) -> None:
    state = server.becomes(GateReason.IDLE)
    assert (state.in_flight, state.source) == (0, "ingress")


def test_a_stream_closes_the_gate_until_its_last_byte(server: LiveServer) -> None:
    body = request(stream=True, max_tokens=64)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.state().in_flight == 1
        for _ in lines:
            pass
    server.becomes(GateReason.IDLE)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_no_count(server: LiveServer, stream: bool) -> None:
    with server.unfinished(stream=stream):
        assert server.state().in_flight == 1
    assert server.becomes(GateReason.IDLE).in_flight == 0


@pytest.mark.parametrize("body", [{"max_tokens": -1}, {"model": "no such model"}, {"prompt": None, "max_tokens": "x"}])
def test_a_refused_request_leaves_no_count(server: LiveServer, body: dict[str, Any]) -> None:
    assert server.ask(**body).is_error
    server.becomes(GateReason.IDLE)


def test_requests_for_metrics_do_not_close_the_gate(server: LiveServer) -> None:
    server.becomes(GateReason.IDLE)
    httpx.get(f"{server.url}/metrics", trust_env=False).raise_for_status()
    assert server.becomes(GateReason.IDLE).in_flight == 0


def test_every_step_and_latency_is_in_the_ring(server: LiveServer) -> None:
    with closing(RingSource(server.gate, parse_slo("ttft:1000s,tpot:1000s,e2e:1000s"))) as rings:
        before = steps_of(rings)
        for _ in range(3):
            server.ask(max_tokens=16).raise_for_status()
        server.rests()
        after = steps_of(rings)
    gained = difference(before, after)
    assert gained is not None
    assert (gained.arrivals, gained.finished, gained.generation_tokens) == (3, 3, 3 * 16)
    assert gained.judged == (3, 0, 0)
    assert gained.ttft is not None
    assert gained.itl is not None
    assert gained.e2e is not None
    assert (gained.ttft.count, gained.itl.count, gained.e2e.count) == (3, 3 * 15, 3)
    assert (after.running, rings.max_num_seqs is not None) == (0, True)


def test_a_request_that_was_hung_up_on_is_no_finished_one(server: LiveServer) -> None:
    with closing(RingSource(server.gate, parse_slo("ttft:1000s,tpot:1000s,e2e:1000s"))) as rings:
        before = steps_of(rings)
        with server.unfinished():
            pass
        server.rests()
        gained = difference(before, steps_of(rings))
    assert gained is not None
    assert (gained.arrivals, gained.finished) == (1, 0)


def test_a_sidecar_reads_the_plugin_and_says_so(server: LiveServer, children: Children, tmp_path: Path) -> None:
    sidecar = LiveSidecar(children, server.url, tmp_path, gate=server.gate)

    def exact() -> Load | None:
        load = sidecar.load()
        return load if load.source == "plugin" and load.gate is not None and load.gate.source == "ingress" else None

    assert eventually(exact, what="exact load").max_num_seqs is not None


def test_a_gate_that_vanishes_under_a_living_server_comes_back(server: LiveServer) -> None:
    (server.gate / GATE_FILE).unlink()
    server.ask().raise_for_status()
    assert server.becomes(GateReason.IDLE).in_flight == 0
    shutil.rmtree(server.gate)
    server.ask().raise_for_status()
    assert server.becomes(GateReason.IDLE).in_flight == 0


def steps_of(rings: RingSource) -> EngineSnapshot:
    """All steps until now."""
    now_s = time.monotonic()
    steps = rings.read(t_s=now_s, monotonic_s=now_s)
    assert steps is not None
    return steps
