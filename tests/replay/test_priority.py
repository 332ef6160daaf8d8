"""The load generator's place before all others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from replay.priority import ahead_of_others


@pytest.mark.skipif(sys.platform != "linux", reason="Linux schedules so")
def test_the_block_runs_in_real_time_where_allowed_and_what_it_starts_does_not() -> None:
    before = os.sched_getscheduler(0)
    show = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
    with ahead_of_others() as allowed:
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        child = int(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    assert policy == (os.SCHED_FIFO if allowed else before)
    assert child == before
    assert os.sched_getscheduler(0) == before


def test_an_error_in_the_block_gives_the_place_back() -> None:
    before = os.sched_getscheduler(0)
    with pytest.raises(RuntimeError), ahead_of_others():
        raise RuntimeError
    assert os.sched_getscheduler(0) == before
