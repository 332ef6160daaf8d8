"""A vLLM plugin for servers on a CPU: processes of a server wait for each other's messages asleep.

After each message a reader of vLLM's queues looks for the next one for a second, over and over, before it waits for a
notification. With more than one request per second such a process is never off its core, however short the requests
are, and a trainer under ``SCHED_IDLE`` on the same core gets some 2 % of it. Beside a GPU the spinning costs a core of
the host; here the core plays the GPU, and its idle time is what the project is about. With this plugin the reader
sleeps in that second too, between looks: for a tenth of the time that it has waited, so that it is late by a tenth at
most, and for 1 ms at the longest.

It is for the servers that this project starts itself, and never raises into vLLM.
"""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger("vllm.wadiloco_quiet")

SHARE = 0.1
SHORTEST_S, LONGEST_S = 5e-5, 1e-3


def register() -> None:
    """Called by vLLM in each of its processes, before their queues are made."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        quieten(SpinCondition)
    except Exception as exc:  # noqa: BLE001 - a server that spins is better than none
        logger.warning("its processes go on spinning while they wait: %s: %s", type(exc).__name__, exc)


def quieten(spin_condition: Any) -> None:
    """Let readers sleep where they would spin.

    Raises:
        AttributeError: the class is another one than in the version of vLLM that this was written for.
    """
    plain = spin_condition.wait
    if getattr(plain, "is_quiet", False):
        return
    for method, name in ((spin_condition.__init__, "busy_loop_s"), (plain, "timeout_ms")):
        if name not in method.__code__.co_varnames:
            raise AttributeError(f"{method.__qualname__} has no {name}")

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        waited_s = time.monotonic() - self.last_read
        if waited_s > self.busy_loop_s:
            plain(self, timeout_ms)
        else:
            time.sleep(pause_s(waited_s))

    wait.is_quiet = True  # type: ignore[attr-defined]
    spin_condition.wait = wait


def pause_s(waited_s: float) -> float:
    """How long a reader sleeps that has waited for so long."""
    return min(max(waited_s * SHARE, SHORTEST_S), LONGEST_S)
