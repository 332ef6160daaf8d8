"""Controllers as real processes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from controller.schema import Heartbeat
from tests.controller.helpers import registration

DEADLINE_S = 20.0
FIXED_H = ("--policy", "fixed_h", "--policy-params", "h=10")


@dataclass
class Process:
    """A running controller."""

    child: subprocess.Popen[str]
    http: httpx.Client
    url: str
    epoch: int = 0
    """Of the last registration."""

    def register(self, agent_id: str = "island-0", instance: str = "first") -> dict[str, Any]:
        body = registration(agent_id, instance).model_dump(mode="json")
        lease = dict(self.http.post("/v1/agents", json=body).raise_for_status().json())
        self.epoch = lease["epoch"]
        return lease

    def beat(self, **fields: Any) -> dict[str, Any]:
        beat = Heartbeat(instance="first", epoch=self.epoch, t_s=time.time(), **fields).model_dump(mode="json")
        return dict(self.http.post("/v1/agents/island-0/heartbeat", json=beat).raise_for_status().json())

    def directives(self, *, after: int, wait_s: float = 10) -> dict[str, Any]:
        query: dict[str, str | float] = {"instance": "first", "after": after, "wait_s": wait_s}
        return dict(self.http.get("/v1/agents/island-0/directives", params=query).raise_for_status().json())


@contextmanager
def controller(journal: Path | str, *options: str, port: int = 0, policy: Sequence[str] = FIXED_H) -> Iterator[Process]:
    """With a journal in a folder, or at a URL."""
    where = str(journal / "journal.sqlite") if isinstance(journal, Path) else journal
    base = ["--port", str(port), "--journal", where, "--num-slots", "1", "--min-h", "2"]
    rule = ["--tick-s", "0.05", "--max-h", "100", *policy]
    command = [sys.executable, "-m", "wadiloco", "controller", *base, *rule, *options]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = _url(child)
        with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
            eventually(lambda: _is_alive(http), "an answer")
            yield Process(child, http, url)
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        if child.stderr is not None:
            child.stderr.close()


def _is_alive(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.ConnectError:
        return False  # The port is logged a moment before it listens.


def _url(child: subprocess.Popen[str]) -> str:
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(line)
        found = re.search(r"listening service=controller url=(\S+)", line)
        if found:
            threading.Thread(target=_drain, args=(child.stderr,), daemon=True).start()
            return found[1]
    raise AssertionError("".join(lines))


def _drain(stream: Any) -> None:
    """A full pipe would stop the process."""
    try:
        for _ in stream:
            pass
    except ValueError:
        pass  # Closed by the test.


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.02)
