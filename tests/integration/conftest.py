"""One gated vLLM server for all tests that need no other layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replay.processes import Children
from replay.vllm_server import cores_for
from tests.conftest import require_vllm
from tests.integration.servers import LiveServer

DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
"""Gives the server its endpoints to sleep and wake up."""


@pytest.fixture(scope="session")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_vllm()
    children = Children()
    server = LiveServer(children, tmp_path_factory.mktemp("gated"), core=cores_for(1)[0], env=DEVELOPER)
    try:
        yield server
    finally:
        children.stop()
        server.close()


@pytest.fixture
def server(gated: LiveServer) -> LiveServer:
    """The gated server, started (again, if an earlier test ended it) and at rest."""
    if not gated.is_running:
        gated.forget()
        gated.start()
    gated.rests()
    return gated
