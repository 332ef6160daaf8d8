"""The example of a plain loop, as its README says: two processes and a synchronizer; and the code of the manual."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.own_loop.train import make_model
from tests.diloco.conftest import REPOSITORY

Spawn = Callable[..., Any]
EXAMPLE = REPOSITORY / "examples" / "own_loop" / "train.py"
MANUAL = REPOSITORY / "docs" / "library.md"
RUN_S = 240.0
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run_both(url: str, directory: Path, *options: str) -> list[str]:
    """What two islands print, once both have ended well."""
    command = [sys.executable, str(EXAMPLE), "--synchronizer", url, *options]
    islands = [
        subprocess.Popen(
            [*command, "--slot", str(slot), "--checkpoint", str(directory / f"{slot}.pt")],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for slot in range(2)
    ]
    try:
        outputs = [island.communicate(timeout=RUN_S)[0] for island in islands]
    finally:
        for island in islands:
            island.kill()
    assert [island.returncode for island in islands] == [0, 0]
    return outputs


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_example_trains_two_islands_and_goes_on_where_it_stopped(spawn: Spawn, tmp_path: Path) -> None:
    url = spawn(tmp_path / "state", "--quorum", "2").url
    outputs = run_both(url, tmp_path, "--steps", "200")
    versions = [re.findall(r"step (\d+) version (\d+)", output) for output in outputs]
    assert versions == [[("50", "1"), ("100", "2"), ("150", "3"), ("200", "4")]] * 2
    outputs += run_both(url, tmp_path, "--steps", "300")
    assert re.findall(r"step (\d+) version (\d+)", outputs[-1]) == [("250", "5"), ("300", "6")]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", outputs[0] + outputs[2])]
    assert losses[-1] < losses[0]
    states = [torch.load(tmp_path / f"{slot}.pt", weights_only=True) for slot in range(2)]
    for name, value in make_model().state_dict().items():
        assert torch.equal(states[0]["module"][name], states[1]["module"][name]), name
        assert not torch.equal(states[0]["module"][name], value)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", MANUAL.read_text(), flags=re.DOTALL)


def test_the_loop_of_the_manual_is_at_most_five_lines_longer_than_a_plain_one() -> None:
    whole = blocks()[0]
    assert sum("sland" in line for line in whole.splitlines()) <= 5


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_code_of_the_manual_runs(spawn: Spawn, tmp_path: Path) -> None:
    url = spawn(tmp_path / "state").url
    script = tmp_path / "manual.py"
    script.write_text("\n".join(blocks()).replace("http://127.0.0.1:9600", url))
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env=ENVIRONMENT, timeout=RUN_S)


def test_the_manual_has_every_public_name() -> None:
    from diloco import Island

    text = MANUAL.read_text()
    public = [name for name in vars(Island) if not name.startswith("_")]
    arguments = [name for name in Island.__init__.__annotations__ if name != "return"]
    for name in (*public, *arguments, "slot", "num_steps", "num_tokens", "last_sync"):
        assert f"`{name}" in text, name
