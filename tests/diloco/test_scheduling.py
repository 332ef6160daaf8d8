"""How urgently a worker runs, as the kernel says it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diloco.scheduling import AUTOGROUP
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(not AUTOGROUP.exists(), reason="a kernel without groups per session")

LOWER = """
from diloco.scheduling import AUTOGROUP, become_idle, lower_session
import os
became, lowered = become_idle(), lower_session()
print(became, lowered, os.sched_getscheduler(0) == os.SCHED_IDLE, AUTOGROUP.read_text().split()[-1])
"""


@pytest.mark.parametrize(("own_session", "said"), [(True, "True True True 19"), (False, "True False True 0")])
def test_only_a_session_of_its_own_is_lowered(own_session: bool, said: str) -> None:
    # A session around the one that may not lower it: what it must leave alone is not this test's own.
    command = [sys.executable, "-c", LOWER]
    if not own_session:
        outer = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)"
        command = [sys.executable, "-c", outer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout.strip() == said
