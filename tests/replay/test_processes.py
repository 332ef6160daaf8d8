"""Children are watched, ended with their whole group, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.processes import ChildFailedError, Children, free_ports, wait_for
from service.errors import ConflictError, UnavailableError

FOREVER = "import time\nwhile True: time.sleep(3600)"
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n{FOREVER}"
PARENT = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {FOREVER!r}]).pid, flush=True)
{FOREVER}
"""


@pytest.fixture
def children() -> Iterator[Children]:
    owned = Children()
    yield owned
    owned.stop(deadline_s=0.0)


def start(children: Children, program: str, log: Path) -> int:
    return children.start("probe", [sys.executable, "-c", program], log=log).process.pid


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: object, deadline_s: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        os.sched_yield()


def first_line(log: Path) -> str:
    until(lambda: log.exists() and "\n" in log.read_text())
    return log.read_text().splitlines()[0]


def test_stop_ends_the_child(children: Children, tmp_path: Path) -> None:
    pid = start(children, FOREVER, tmp_path / "log")
    children.stop()
    assert not alive(pid)
    assert children.running == []


def test_a_child_that_ignores_sigterm_is_killed(children: Children, tmp_path: Path) -> None:
    pid = start(children, STUBBORN, tmp_path / "log")
    first_line(tmp_path / "log")
    children.stop(deadline_s=0.1)
    assert not alive(pid)


def test_grandchildren_go_with_their_group(children: Children, tmp_path: Path) -> None:
    start(children, PARENT, tmp_path / "log")
    grandchild = int(first_line(tmp_path / "log"))
    children.stop()
    until(lambda: not alive(grandchild))


def test_a_failed_child_is_reported_with_its_last_lines(children: Children, tmp_path: Path) -> None:
    start(children, "print('no such model'); raise SystemExit(3)", tmp_path / "log")
    with pytest.raises(ChildFailedError, match=r"probe ended with exit code 3(.|\n)*no such model"):
        asyncio.run(wait_for("probe", lambda: False, children=children, deadline_s=10.0))


def test_waiting_ends_at_its_deadline(children: Children, tmp_path: Path) -> None:
    start(children, FOREVER, tmp_path / "log")
    with pytest.raises(UnavailableError, match="did not come up within 0 s"):
        asyncio.run(wait_for("probe", lambda: False, children=children, deadline_s=0.2))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from replay.processes import Children\n"
        f"child = Children().start('probe', [sys.executable, '-c', {FOREVER!r}], log=Path({str(tmp_path / 'log')!r}))\n"
        f"print(child.process.pid, flush=True)\n{FOREVER}"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    until(lambda: not alive(pid))


def test_ports_in_use_are_passed_over_and_a_full_range_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        assert taken not in free_ports(1, range(taken, min(taken + 20, 65536)))
        with pytest.raises(ConflictError, match=rf"1 free ports are needed, {taken}-{taken} has 0 \(.*--ports"):
            free_ports(1, range(taken, taken + 1))
