"""How urgently a worker runs, as the kernel says it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from diloco.scheduling import AUTOGROUP, become_idle, come_back
from tests.conftest import ROOT

needs_groups = pytest.mark.skipif(not AUTOGROUP.exists(), reason="a kernel without groups per session")

LOWER = """
from diloco.scheduling import AUTOGROUP, become_idle, lower_session
import os
became, lowered = become_idle(), lower_session()
print(became, lowered, os.sched_getscheduler(0) == os.SCHED_IDLE, AUTOGROUP.read_text().split()[-1])
"""


@needs_groups
@pytest.mark.parametrize(("own_session", "said"), [(True, "True True True 19"), (False, "True False True 0")])
def test_only_a_session_of_its_own_is_lowered(own_session: bool, said: str) -> None:
    # A session around the one that may not lower it: what it must leave alone is not this test's own.
    command = [sys.executable, "-c", LOWER]
    if not own_session:
        outer = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)"
        command = [sys.executable, "-c", outer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout.strip() == said


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may raise a priority")
def test_an_idle_thread_comes_back() -> None:
    is_idle, may_end = threading.Event(), threading.Event()

    def run() -> None:
        become_idle()
        is_idle.set()
        may_end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_idle.wait(60)
        assert thread.native_id is not None
        assert os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE
        assert come_back(thread.native_id)
        assert os.sched_getscheduler(thread.native_id) == os.SCHED_OTHER
    finally:
        may_end.set()
        thread.join()
