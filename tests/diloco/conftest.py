"""Synchronizers on loopback: in a thread for speed, as a process where it has to die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from diloco.synchronizer.app import create_app
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.storage import owned
from diloco.transport import SynchronizerClient
from service.app import answer_error
from service.errors import WadilocoError
from service.server import Server, bind
from service.store_api import SharedStore, build_store_router
from tests.diloco.rank_process import RankProcess, Ranks

REPOSITORY = Path(__file__).parents[2]
START_S = 60.0
LISTENING = re.compile(r"listening service=synchronizer url=(http://\S+)")


class Serve(Protocol):
    """Starts a synchronizer in a thread on ``directory`` and returns its URL."""

    def __call__(self, directory: Path, **settings: Any) -> str: ...


class Spawn(Protocol):
    """Starts a synchronizer as a process."""

    def __call__(self, directory: Path, *options: str) -> SynchronizerProcess: ...


@contextmanager
def served(settings: SynchronizerSettings) -> Iterator[str]:
    with owned(settings.directory), bind("127.0.0.1", settings.port) as listener:
        config = uvicorn.Config(
            create_app(settings), log_config=None, access_log=False, timeout_graceful_shutdown=2, lifespan="on"
        )
        server = Server(config, "service=synchronizer")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(10)
        assert not thread.is_alive()


class SynchronizerProcess:
    """A real synchronizer process; a restart keeps its address."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._arguments = ["--directory", str(directory), *options]
        self.lines: list[str] = []
        self.url = self.start(port=0)

    def start(self, *, port: int | None = None) -> str:
        port = int(self.url.rpartition(":")[2]) if port is None else port
        self.lines.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wadiloco", "synchronizer", "--port", str(port), *self._arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()
        wait_until(lambda: self.find(LISTENING) is not None or self._process.poll() is not None)
        found = self.find(LISTENING)
        if found is None:
            code = self._finish()
            raise AssertionError(f"synchronizer ended with {code}: {self.lines}")
        return found[1]

    def find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return next((match for line in list(self.lines) if (match := pattern.search(line))), None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._finish()

    def stop(self) -> int:
        self._process.terminate()
        return self._finish()

    def _finish(self) -> int:
        code = self._process.wait(30)
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.lines.extend(iter(process.stderr.readline, ""))


def wait_until(condition: Callable[[], object], *, timeout_s: float = START_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition did not come true in time"
        threading.Event().wait(0.01)


@pytest.fixture
def store_url() -> Iterator[str]:
    """A rendezvous store in a thread."""
    app = FastAPI()
    app.state.tasks = None
    app.add_exception_handler(WadilocoError, answer_error)
    store = SharedStore()
    app.include_router(build_store_router(store))
    with bind("127.0.0.1", 0) as listener:
        server = Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        store.close()
        server.handle_exit(signal.SIGTERM, None)
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def ranks(store_url: str) -> Iterator[Ranks]:
    """Starts ranks as processes."""
    running: list[RankProcess] = []

    def start(num_ranks: int) -> list[RankProcess]:
        running.extend(RankProcess(rank, store_url) for rank in range(num_ranks))
        return list(running)

    yield start
    for rank in running:
        rank.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    stack: list[Any] = []

    def start(directory: Path, **settings: Any) -> str:
        context = served(SynchronizerSettings(port=0, directory=directory, **settings))
        url = context.__enter__()
        stack.append(context)
        return url

    yield start
    for context in reversed(stack):
        context.__exit__(None, None, None)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    processes: list[SynchronizerProcess] = []

    def start(directory: Path, *options: str) -> SynchronizerProcess:
        processes.append(SynchronizerProcess(directory, *options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], SynchronizerClient]]:
    clients: list[SynchronizerClient] = []

    def start(url: str) -> SynchronizerClient:
        clients.append(SynchronizerClient(httpx.Client(base_url=url, timeout=10, trust_env=False)))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
