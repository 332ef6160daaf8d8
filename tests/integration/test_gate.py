"""Plugin and middleware in a real vLLM server, with a sidecar and a training worker's reader beside it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from replay.processes import Child, Children, answers, free_ports, wait_for
from replay.vllm_server import SERVED_NAME, START_DEADLINE_S, cores_for, start_vllm
from sidecar.schema import Load
from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.vllm_plugin.gate_reader import GateReader, GateReason, GateState
from sidecar.vllm_plugin.identity import default_directory
from sidecar.vllm_plugin.records import GATE_FILE
from tests.conftest import VLLM
from tests.integration.helpers import WADILOCO, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(600)]

LONG_ANSWER_TOKENS = 900


class GatedServer:
    """A vLLM server with middleware and plugin, that can be killed and started again."""

    def __init__(self, children: Children, logs: Path) -> None:
        self._children = children
        self._logs = logs
        self.port = free_ports(1, range(18700, 18800))[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.gate = default_directory(self.port)
        self.reader = GateReader(self.gate)
        self._process = self.start()

    def start(self) -> Child:
        child = start_vllm(
            self._children,
            VLLM,
            name="vllm",
            port=self.port,
            core=cores_for(1)[0],
            logs=self._logs,
            gate=self.gate,
            with_middleware=True,
        )
        healthy = functools.partial(answers, f"{self.url}/health")
        asyncio.run(wait_for(self.url, healthy, children=self._children, deadline_s=START_DEADLINE_S, period_s=0.5))
        self._process = child
        return child

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.process.pid, signal.SIGKILL)
        self._process.process.wait(10)
        self._children.running.remove(self._process)

    def state(self) -> GateState:
        return self.reader.read(time.monotonic())

    def becomes(self, reason: GateReason) -> GateState:
        return eventually(
            lambda: state if (state := self.state()).reason is reason else None, what=f"{reason}, not {self.state()}"
        )

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=request(**body), timeout=60, trust_env=False)

    @contextlib.contextmanager
    def unfinished(self, **body: Any) -> Iterator[None]:
        """A request that the engine runs; its client hangs up when the block ends."""
        content = json.dumps(request(**body)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            eventually(lambda: self.state().running, what="a running request")
            yield


def request(**body: Any) -> dict[str, Any]:
    return {"model": SERVED_NAME, "prompt": "A gate", "max_tokens": 16, "ignore_eos": True, **body}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedServer]:
    VLLM.check()
    children = Children()
    try:
        server = GatedServer(children, tmp_path_factory.mktemp("gated"))
        yield server
        server.reader.close()
        shutil.rmtree(server.gate, ignore_errors=True)
    finally:
        children.stop()


def test_an_idle_server_keeps_its_gate_open(server: GatedServer) -> None:
    state = server.becomes(GateReason.IDLE)
    assert (state.in_flight, state.source) == (0, "ingress")


def test_a_stream_closes_the_gate_until_its_last_byte(server: GatedServer) -> None:
    body = request(stream=True, max_tokens=64)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.state().in_flight == 1
        for _ in lines:
            pass
    server.becomes(GateReason.IDLE)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_no_count(server: GatedServer, stream: bool) -> None:
    with server.unfinished(stream=stream, max_tokens=LONG_ANSWER_TOKENS):
        assert server.state().in_flight == 1
    assert server.becomes(GateReason.IDLE).in_flight == 0


@pytest.mark.parametrize("body", [{"max_tokens": -1}, {"model": "no such model"}, {"prompt": None, "max_tokens": "x"}])
def test_a_refused_request_leaves_no_count(server: GatedServer, body: dict[str, Any]) -> None:
    assert server.ask(**body).is_error
    server.becomes(GateReason.IDLE)


def test_requests_for_metrics_do_not_close_the_gate(server: GatedServer) -> None:
    server.becomes(GateReason.IDLE)
    httpx.get(f"{server.url}/metrics", trust_env=False).raise_for_status()
    assert not server.state().busy


def test_every_step_and_latency_is_in_the_ring(server: GatedServer) -> None:
    source = RingSource(server.gate, parse_slo("ttft:1000s,tpot:1000s,e2e:1000s"))
    before = source.read(t_s=0.0, monotonic_s=time.monotonic())
    assert before is not None
    for _ in range(3):
        server.ask(max_tokens=16).raise_for_status()
    server.becomes(GateReason.IDLE)
    after = source.read(t_s=0.0, monotonic_s=time.monotonic())
    source.close()
    assert after is not None
    assert after.generation_tokens is not None
    assert before.generation_tokens is not None
    assert after.finished is not None
    assert before.finished is not None
    assert after.generation_tokens - before.generation_tokens == 3 * 16
    assert after.finished - before.finished == 3
    assert after.ttft is not None
    assert before.judged is not None
    assert after.judged is not None
    assert after.judged.requests - before.judged.requests == 3
    assert after.judged.violations_upper == 0
    assert after.itl is not None
    assert after.e2e is not None
    assert (after.ttft.count, after.itl.count, after.e2e.count) == (3, 3 * 15, 3)
    assert (after.running, source.max_num_seqs is not None) == (0, True)


def test_a_sidecar_reads_the_plugin_and_says_so(server: GatedServer, children: Children, tmp_path: Path) -> None:
    port = free_ports(1, range(18700, 18800))[0]
    options = ("--vllm", server.url, "--port", str(port), "--gate", str(server.gate), "--scrape-interval-s", "0.2")
    children.start("sidecar", [*WADILOCO, "sidecar", *options], log=tmp_path / "sidecar.log")

    def load() -> Load | None:
        seen = Load.model_validate_json(httpx.get(f"http://127.0.0.1:{port}/v1/load", trust_env=False).text)
        return seen if seen.source == "plugin" and seen.gate is not None and seen.gate.source == "ingress" else None

    assert eventually(load, what="exact load").max_num_seqs is not None


def test_a_killed_server_leaves_no_count_behind(server: GatedServer) -> None:
    with server.unfinished(max_tokens=LONG_ANSWER_TOKENS):
        server.kill()
    assert server.becomes(GateReason.NO_WRITER).busy
    server.start()
    assert server.becomes(GateReason.IDLE).in_flight == 0
    server.ask().raise_for_status()
    assert server.becomes(GateReason.IDLE).in_flight == 0


def test_a_gate_that_vanishes_under_a_living_server_comes_back(server: GatedServer) -> None:
    (server.gate / GATE_FILE).unlink()
    server.ask().raise_for_status()
    assert server.becomes(GateReason.IDLE).in_flight == 0
    shutil.rmtree(server.gate)
    server.ask().raise_for_status()
    assert server.becomes(GateReason.IDLE).in_flight == 0
