"""What this host lacks is said in one line, before anybody hears of the agent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from diloco.agent.preflight import check_cores, check_ranks
from diloco.scheduling import usable_cores
from service.errors import ConfigError

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pinning is Linux's")


@pytest.fixture
def controller() -> Iterator[tuple[str, list[str]]]:
    """Address of a server, and the requests that it got."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.path)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", heard
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--data", "nowhere"), "data: nowhere does not exist"),
        (("--workload", "nowhere:make"), "workload: no module nowhere on Python's path or in "),
        (("--workload", "wadiloco:make"), "workload: wadiloco ("),
        pytest.param(("--cores", "4095"), "cores: this process cannot run on 4095, only on ", marks=on_linux),
    ],
)
def test_what_the_host_lacks_is_refused_before_registering(
    controller: tuple[str, list[str]], tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    url, heard = controller
    done = subprocess.run(
        [sys.executable, "-m", "wadiloco", "island", "--port", "0", "--controller", url, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"wadiloco island: {said}")
    assert done.stderr.count("\n") == 1
    assert heard == []


@on_linux
def test_a_core_beyond_the_last_is_refused_and_the_others_are_named() -> None:
    usable = usable_cores()
    assert usable is not None
    check_cores(tuple(usable))
    with pytest.raises(ConfigError, match=f"cannot run on {max(usable) + 1}, only on {min(usable)}") as caught:
        check_cores((min(usable), max(usable) + 1))
    assert caught.value.field == "cores"


@on_linux
def test_more_ranks_than_cores_are_refused() -> None:
    usable = usable_cores()
    assert usable is not None
    check_ranks(1, ())
    check_ranks(len(usable), ())
    check_ranks(2, (0, 1))
    with pytest.raises(ConfigError, match=f"this process may use {len(usable)}") as caught:
        check_ranks(len(usable) + 1, ())
    assert caught.value.field == "ranks"
    with pytest.raises(ConfigError, match="--cores has 1"):
        check_ranks(2, (1, 1))


@on_linux
def test_looking_for_cores_leaves_the_thread_where_it_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    usable = usable_cores()
    assert os.sched_getaffinity(0) == before
    assert usable is not None
    assert usable >= before
