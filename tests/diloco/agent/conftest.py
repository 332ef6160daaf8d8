"""Island agents as real processes, beside a real controller."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from diloco.schema import AgentStatus, Progress

REPOSITORY = Path(__file__).parents[3]
START_S = 100.0
LISTENING = re.compile(r"listening service=\w+ url=(http://\S+)")
TINY = (
    *("--num-layers", "1", "--num-heads", "2", "--width", "32", "--context", "16", "--batch-size", "4"),
    *("--lr", "0.003", "--warmup-steps", "5", "--data-shards", "2", "--no-idle-priority"),
)

T = TypeVar("T")


class Service:
    """One ``wadiloco`` process, and how to ask it."""

    def __init__(self, command: str, *options: str, cwd: Path = REPOSITORY) -> None:
        self._argv = [sys.executable, "-m", "wadiloco", command, *options]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            self._argv,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        def find() -> str | None:
            return next((found[1] for line in list(self.lines) if (found := LISTENING.search(line))), None)

        return self.until(find)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=10, trust_env=False)

    def until(self, probe: Callable[[], T | None], *, timeout_s: float = START_S) -> T:
        """The first truthy result of ``probe`` while the process lives."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                result = probe()
            except httpx.TransportError:
                result = None
            if result:
                return result
            tail = "".join(self.lines[-20:])
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {tail}"
            assert time.monotonic() < deadline_s, f"did not come true in time: {tail}"
            threading.Event().wait(0.02)

    def log(self) -> str:
        return "".join(self.lines)

    def terminate(self) -> int:
        self.process.terminate()
        return self.finish()

    def kill(self) -> None:
        self.process.kill()
        self.finish()

    def finish(self, timeout_s: float = 15.0) -> int:
        code = self.process.wait(timeout_s)
        # A worker that outlives its agent still holds the other end of the pipe.
        self._reader.join(15)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))


class IslandService(Service):
    def status(self) -> AgentStatus:
        return AgentStatus.model_validate_json(self.get("/v1/status").content)

    def progress(self) -> Progress:
        return Progress.model_validate_json(self.get("/v1/progress").content)

    def until_logged(self, text: str) -> str:
        """The log, once it has the text."""
        self.until(lambda: text in self.log())
        return self.log()

    def until_progress(self, accept: Callable[[Progress], bool]) -> Progress:
        def probe() -> Progress | None:
            progress = self.progress()
            return progress if accept(progress) else None

        return self.until(probe)

    def until_status(self, accept: Callable[[AgentStatus], bool]) -> AgentStatus:
        def probe() -> AgentStatus | None:
            status = self.status()
            return status if accept(status) else None

        return self.until(probe)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture
def run_service() -> Iterator[Callable[..., Service]]:
    running: list[Service] = []

    def start(command: str, *options: str) -> Service:
        running.append(Service(command, *options))
        return running[-1]

    yield start
    for service in running:
        service.close()


@pytest.fixture
def run_island(corpus: Path) -> Iterator[Callable[..., IslandService]]:
    """Starts a tiny island; further options come last and win."""
    running: list[IslandService] = []

    def start(*options: str) -> IslandService:
        # Those of killed agents would stay in shared memory, and their workers in reserve only take the others' time.
        away = ("--vault-dir", str(corpus.parent / "vaults"), "--standby-workers", "0")
        running.append(IslandService("island", "--port", "0", "--data", str(corpus), *TINY, *away, *options))
        return running[-1]

    yield start
    for service in running:
        service.close()
