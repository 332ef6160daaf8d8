"""Sees to it that nothing is left behind: the command itself runs in a child, whatever becomes of that.

The parent adopts what the child leaves, however that ends, and kills it. The child in turn is told when the parent
ends, and ends everything in order. A stopped process, which would take no notice of either, is killed as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from replay.chaos.procfs import adopt_orphans, end_descendants
from replay.chaos.shared_memory import remove_folder_of
from replay.processes import PR_SET_PDEATHSIG
from service.errors import UnavailableError


def guarded(body: Callable[[], int]) -> int:
    """Run ``body`` in a child process and return its exit code; afterwards none of its processes lives.

    Raises:
        UnavailableError: this is not Linux.
    """
    if sys.platform != "linux":
        raise UnavailableError("processes are stopped, watched and ended as Linux does it", remedy="run it on Linux")
    adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        return body()

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    _, status = os.waitpid(pid, 0)
    end_descendants(parent)
    remove_folder_of(pid)
    code = os.waitstatus_to_exitcode(status)
    # Not by an exception: what would have been written by now was written by the child.
    os._exit(code if code >= 0 else 128 - code)
