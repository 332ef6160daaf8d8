"""Child processes of an experiment: started with a log each, watched, and never left behind.

Every child leads a process group of its own and gets SIGTERM when its parent dies (Linux), however that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from service.errors import ConflictError, UnavailableError

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 15.0
LOG_TAIL_LINES = 12
PR_SET_PDEATHSIG = 1


@dataclass(eq=False, slots=True)
class Child:
    """One running process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])


class ChildFailedError(UnavailableError):
    """A process ended that should be running."""


@dataclass(slots=True)
class Children:
    """The processes that one experiment started, in the order of their start."""

    running: list[Child] = field(default_factory=list)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
    ) -> Child:
        """Start ``command``, its output appended to ``log``; with ``core``, pinned to that CPU."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - commands are built by this package
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_child_setup(core),
            )
        child = Child(name, process, log)
        self.running.append(child)
        logger.debug("started child=%s pid=%d log=%s", name, process.pid, log)
        return child

    def check(self) -> None:
        """Raise `ChildFailedError` if any child has ended."""
        for child in self.running:
            if child.exit_code is not None:
                raise child_failed(child)

    def below(self, directory: Path) -> list[Child]:
        """The children that log into ``directory``."""
        return [child for child in self.running if child.log.parent == directory]

    def stop(self, children: Iterable[Child] | None = None, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the given children (default all): SIGTERM, then SIGKILL to what is left of their groups."""
        chosen = list(self.running if children is None else children)
        for child in chosen:
            if child.exit_code is None:
                child.process.terminate()
        deadline = time.monotonic() + deadline_s
        for child in chosen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            if child.exit_code is None:
                logger.warning("child did not stop in time, killed child=%s", child.name)
            # The leader may be gone while a child of its own lingers: the group outlives its leader.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
        self.running = [child for child in self.running if child not in chosen]


def child_failed(child: Child) -> ChildFailedError:
    code = child.exit_code
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return ChildFailedError(f"{child.name} {how}; its last lines:\n{child.log_tail()}", remedy=f"see {child.log}")


async def wait_for(
    what: str, probe: Callable[[], bool], *, children: Children, deadline_s: float, period_s: float = 0.1
) -> None:
    """Wait until ``probe()`` is true, watching the children meanwhile.

    Raises:
        ChildFailedError: a child ended first.
        UnavailableError: the deadline passed.
    """
    deadline = time.monotonic() + deadline_s
    while not await asyncio.to_thread(probe):
        children.check()
        if time.monotonic() > deadline:
            logs = ", ".join(sorted({str(child.log.parent) for child in children.running}))
            raise UnavailableError(
                f"{what} did not come up within {deadline_s:.0f} s", remedy=f"see the logs in {logs}"
            )
        await asyncio.sleep(period_s)


def answers(url: str) -> bool:
    """Whether a GET of ``url`` answers 200 now."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def free_ports(count: int, ports: range, *, host: str = "127.0.0.1") -> list[int]:
    """``count`` ports of the range that nobody listens on.

    Raises:
        ConflictError: the range has not that many.
    """
    found: list[int] = []
    for port in ports:
        if len(found) == count:
            break
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                found.append(port)
    if len(found) < count:
        raise ConflictError(
            f"{count} free ports are needed, {ports.start}-{ports.stop - 1} has {len(found)}",
            field="ports",
            remedy="stop what listens there, or choose another --ports FIRST-LAST",
        )
    return found


def _child_setup(core: int | None) -> Callable[[], None]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def setup() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # the parent died between fork and prctl
                os._exit(1)
            if core is not None:
                os.sched_setaffinity(0, {core})

    return setup
