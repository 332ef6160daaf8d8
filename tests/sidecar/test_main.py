"""The sidecar as a process: it starts without its peers, ends on SIGTERM, and says why it cannot start."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

pytestmark = pytest.mark.integration
DEADLINE_S = 30.0


@contextmanager
def sidecar(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "wadiloco", "sidecar", "--vllm", "http://127.0.0.1:9", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        match = re.search(r"url=(http://\S+)", line)
        if match:
            return match[1]
    raise AssertionError("ended before it listened")


def test_it_serves_without_its_peers_and_ends_on_sigterm() -> None:
    with sidecar("--port", "0", "--controller", "http://127.0.0.1:9") as process:
        url = url_of(process)
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(base_url=url, transport=transport, timeout=DEADLINE_S) as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/load").json()["state"] == "starting"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_a_taken_port_is_one_clear_error() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with sidecar("--port", str(port)) as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 4
            assert f"port: {port} on 127.0.0.1 is in use" in errors.splitlines()[-1]
