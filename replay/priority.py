"""The load generator goes before what it measures.

It shares the machine with servers and trainers, and needs a hundredth of a core. As an ordinary process it was seen to
wait for one until a whole answer was there (Linux groups by session; a group that rarely runs can be made to wait while
a low-weight one comes and goes): requests left up to 0.7 s late, their tokens were all read at once, and the wait was
taken for latency of the server.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ahead_of_others() -> Iterator[bool]:
    """Run the block in real time where the platform allows it (Linux, root or CAP_SYS_NICE); says whether it does.

    Applies to the calling thread; processes that it starts are ordinary ones.
    """
    if sys.platform != "linux":
        yield False
        return
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, before, parameters)
