"""Where and how urgently a thread runs: the cores of the island, and ``SCHED_IDLE`` for the inner steps.

On Linux both belong to the calling thread and are inherited by the threads that it starts. An unprivileged thread that
went to ``SCHED_IDLE`` cannot come back, so threads that must stay responsive start before.
Measured beside a real vLLM on shared cores: an ordinary trainer raised the p50 of 32-token answers from about 86 to
530 ms, a ``SCHED_IDLE`` one to between 121 and 158 ms.

``SCHED_IDLE`` ranks a thread within its group only, and Linux makes groups of its own: one per session (autogroup), one
per container (cgroup). Between groups each has its full weight, whatever runs in it: beside a busy thread of another
session an idle one was seen to get half of the core, and 2 % of it once its session was lowered too. Hence the worker's
is; a container's weight is its engine's to set (``--cpu-shares 2``).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

AUTOGROUP = Path("/proc/self/autogroup")
MAX_CORES = 4096
LOWEST_NICE = 19
"""Of a session's group: 1.5 % of the weight of an ordinary one."""


def pin_to(cores: Collection[int]) -> bool:
    """Let the calling thread run on these cores only; says whether the platform and the cores allow it."""
    if not cores:
        return False
    if sys.platform != "linux":
        logger.warning("core pinning is not available platform=%s", sys.platform)
        return False
    try:
        os.sched_setaffinity(0, cores)
    except OSError as exc:
        logger.warning("cannot pin to cores, going on unpinned cores=%s error=%s", sorted(cores), exc.strerror)
        return False
    return True


def usable_cores() -> frozenset[int] | None:
    """Numbers of the cores that a thread of this process can be pinned to; None where the platform has no pinning.

    More than the calling thread's, where that is pinned itself (``taskset``): a container's cpuset is the limit.
    """
    if sys.platform != "linux":
        return None
    with ThreadPoolExecutor(1) as throwaway:
        return throwaway.submit(_widest_affinity).result()


def _widest_affinity() -> frozenset[int]:
    try:
        os.sched_setaffinity(0, range(MAX_CORES))
    except OSError as exc:  # a sandbox may forbid it: then this thread's own are all that there is
        logger.debug("cannot widen the affinity error=%s", exc.strerror)
    return frozenset(os.sched_getaffinity(0))


def become_idle() -> bool:
    """Let the calling thread run only when nobody else wants its core; says whether the platform has that."""
    if sys.platform != "linux":
        logger.warning("SCHED_IDLE is not available, running at low nice instead platform=%s", sys.platform)
        if hasattr(os, "nice"):
            os.nice(19)
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as exc:
        logger.warning("SCHED_IDLE refused, going on at normal priority error=%s", exc.strerror)
        return False
    return True


def come_back(thread_id: int) -> bool:
    """Let an idle thread of this process have ordinary priority again; says whether that is allowed (it is to root)."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(thread_id, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return False
    return True


def lower_session() -> bool:
    """Let other sessions go before this one; says whether it does. For a process that leads a session of its own."""
    if not AUTOGROUP.exists():  # no such groups on this platform: threads are ranked one by one
        return False
    if os.getsid(0) != os.getpid():
        logger.warning("not the leader of a session: its other processes would be slowed down too, left as it is")
        return False
    try:
        AUTOGROUP.write_text(str(LOWEST_NICE))
    except OSError as exc:
        logger.warning("cannot lower the session, idle threads may hold up a server error=%s", exc.strerror)
        return False
    return True
