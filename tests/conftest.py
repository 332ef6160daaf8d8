"""A real vLLM server, one per test session, for every test that is marked `vllm`."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from replay.processes import Children, answers, free_ports, wait_for
from replay.vllm_server import START_DEADLINE_S, LocalVllm, cores_for, start_vllm
from tests.controller.postgres import Server, running_server

# How long an example takes says something about the machine, not about the code: that is what `bench` is for.
hypothesis.settings.register_profile("wadiloco", deadline=None)
hypothesis.settings.load_profile("wadiloco")

ROOT = Path(__file__).parents[1]
VLLM = LocalVllm(ROOT / os.environ.get("VLLM_VENV", ".venv-vllm"), ROOT / ".local" / "tiny-llama")


@pytest.fixture
def root_logging() -> Iterator[None]:
    """Logging as it was, after a test that runs a command within this process: commands configure it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def children() -> Iterator[Children]:
    """Processes of one test, ended after it."""
    owned = Children()
    yield owned
    owned.stop()


def require_vllm() -> None:
    """Where no CPU build exists the tests are skipped; where it exists and is not installed they fail."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("no CPU build of vLLM for this platform")
    VLLM.check()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A real PostgreSQL server; skips where none is installed."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM server on this machine's first core."""
    require_vllm()
    children = Children()
    port = free_ports(1, range(18500, 18600))[0]
    url = f"http://127.0.0.1:{port}"
    try:
        start_vllm(children, VLLM, name="vllm", port=port, core=cores_for(1)[0], logs=tmp_path_factory.mktemp("vllm"))
        healthy = functools.partial(answers, f"{url}/health")
        asyncio.run(wait_for(url, healthy, children=children, deadline_s=START_DEADLINE_S, period_s=0.5))
        yield url
        children.check()
    finally:
        children.stop()
