"""The example of ranks of one's own, as its README says: two islands of two ranks each, started by torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diloco.conftest import REPOSITORY
from tests.diloco.test_own_loop import ENVIRONMENT, RUN_S

EXAMPLE = REPOSITORY / "examples" / "own_ranks" / "train.py"


def run_both(url: str, directory: Path, *options: str) -> list[str]:
    """What two islands print, once all ranks have ended well."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    islands = [
        subprocess.Popen(
            [*launch, str(EXAMPLE), "--synchronizer", url, *options, "--slot", str(slot), "--checkpoint", name],
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=ENVIRONMENT,
        )
        for slot, name in enumerate("ab")
    ]
    try:
        outputs = [island.communicate(timeout=RUN_S)[0] for island in islands]
    finally:
        for island in islands:
            island.terminate()  # so that it ends its ranks
            island.wait(60)
    assert [island.returncode for island in islands] == [0, 0]
    return outputs


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_example_trains_two_islands_of_two_ranks_and_goes_on_where_it_stopped(
    spawn: Callable[..., Any], tmp_path: Path
) -> None:
    url = spawn(tmp_path / "state", "--quorum", "2").url
    outputs = run_both(url, tmp_path, "--steps", "100")
    versions = [re.findall(r"step (\d+) version (\d+)", output) for output in outputs]
    assert versions == [[("25", "1"), ("50", "2"), ("75", "3"), ("100", "4")]] * 2
    outputs = run_both(url, tmp_path, "--steps", "150")
    assert re.findall(r"step (\d+) version (\d+)", outputs[1]) == [("125", "5"), ("150", "6")]
    states = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("a.0", "a.1", "b.0", "b.1")}
    for island in "ab":
        first, second = states[f"{island}.0"], states[f"{island}.1"]
        assert (first["num_tokens"], second["num_tokens"]) == (150 * 64, 150 * 64)
        for name, value in first["module"].items():
            assert torch.equal(value, second["module"][name]), name
    # Of the fragment that synced last all islands have the same.
    last = [states[name]["fragments"][1]["global"] for name in ("a.0", "b.0")]
    assert torch.equal(*last)
