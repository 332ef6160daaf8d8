from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.agent import dry_run
from diloco.agent.config import IslandSettings
from diloco.footprint import Footprint
from examples.own_model.spirals import Spirals
from service.errors import InputError
from service.settings import load_settings
from tests.diloco.agent.conftest import REPOSITORY

SHAPE = ("--num-layers", "1", "--num-heads", "2", "--width", "32", "--context", "16", "--batch-size", "4")
PARAMETERS = 256 * 32 + 16 * 32 + (12 * 32 * 32 + 13 * 32) + 2 * 32


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a dry run asks nobody")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)


def measure(*options: str) -> Footprint:
    return dry_run.measure(load_settings(IslandSettings, ["--dry-run", *options]))


def test_what_the_built_in_model_takes(corpus: Path) -> None:
    told = measure(*SHAPE, "--data", str(corpus), "--codec", "int8", "--bandwidth", "8kbit/s")
    assert told.model == "byte GPT"
    assert told.num_parameters == told.num_trained == PARAMETERS
    assert told.tokens_per_step == 4 * 16
    whole = 4 * PARAMETERS
    memory = told.memory
    assert (memory.parameters, memory.gradients, memory.buffers) == (whole, whole, 0)
    assert 2 * whole <= memory.optimizer < 2 * whole + 1000  # AdamW: two moments, and a count of steps
    assert told.memory_total == memory.total > 10 * whole
    assert memory.vault == 2 * (memory.parameters + memory.optimizer) + 6 * whole
    assert "vault" in dry_run.describe(told)
    without = measure(*SHAPE, "--data", str(corpus), "--codec", "int8", "--no-vault")
    assert without.memory_total == told.memory_total - memory.vault
    assert told.pull_bytes == whole
    assert whole / 4 < told.push_bytes < whole / 3.8
    assert told.sync_s == pytest.approx((told.push_bytes + told.pull_bytes) / 1000)
    assert [each.num_values for each in told.fragments] == [PARAMETERS]
    assert told.step is None


def test_fragments_and_encoded_pulls_are_told_each(corpus: Path) -> None:
    options = ("--num-fragments", "3", "--codec", "int4", "--pull-codec", "int4")
    told = measure(*SHAPE, "--data", str(corpus), *options)
    assert len(told.fragments) == 3
    assert sum(each.num_values for each in told.fragments) == PARAMETERS
    assert max(each.num_values for each in told.fragments) < PARAMETERS / 2
    assert (told.push_bytes, told.pull_codec) == (told.pull_bytes, "int4")
    assert told.push_bytes < 4 * PARAMETERS / 7
    assert "fragment 2" in dry_run.describe(told)
    with pytest.raises(InputError, match="fragment"):
        measure(*SHAPE, "--data", str(corpus), "--num-fragments", "1000")


def test_steps_are_measured_with_the_options_of_the_inner_loop(corpus: Path) -> None:
    told = measure(*SHAPE, "--data", str(corpus), "--dry-run-steps", "3", "--accumulation-steps", "2")
    assert told.tokens_per_step == 2 * 4 * 16
    assert told.step is not None
    assert told.step.steps == 3
    assert 0 < told.step.shortest_s <= told.step.median_s
    assert told.step.tokens_per_s > 0
    assert told.step.peak_rss_bytes > told.memory.parameters
    assert "inner step" in dry_run.describe(told)


def test_of_several_ranks_the_first_is_counted(corpus: Path) -> None:
    options = (*SHAPE, "--data", str(corpus))
    alone, two = measure(*options), measure(*options, "--ranks", "2", "--dry-run-steps", "1")
    whole = 4 * PARAMETERS
    assert (alone.num_ranks, two.num_ranks) == (1, 2)
    assert two.tokens_per_step == alone.tokens_per_step  # the rows are shared out
    assert (alone.memory.averaging, two.memory.averaging) == (0, whole)
    assert two.memory_total == alone.memory_total + whole
    assert "\nranks            2: " in dry_run.describe(two)
    assert "ranks" not in dry_run.describe(alone)
    sharded = measure(*options, "--ranks", "2", "--shard-optimizer")
    assert sharded.memory.averaging == 2 * whole
    assert 0.4 * alone.memory.optimizer < sharded.memory.optimizer < 0.7 * alone.memory.optimizer


def test_ranks_of_an_own_model_have_batches_of_their_own() -> None:
    options = ("--workload", f"{__name__}:make_momentum", "--data-shards", "2")
    assert measure(*options, "--ranks", "3").tokens_per_step == 3 * measure(*options).tokens_per_step


class Momentum(Spirals):
    """Half frozen, with an optimizer that keeps one value per trained parameter."""

    def build_model(self, *, seed: int) -> nn.Module:
        model = super().build_model(seed=seed)
        model.get_submodule("0").requires_grad_(False)
        return model

    def build_optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        parameters = [each for each in model.parameters() if each.requires_grad]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Failing(Spirals):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("shapes")


def make_momentum() -> Momentum:
    return Momentum(width=8, batch_size=4, num_samples=64)


def make_failing() -> Failing:
    return Failing(width=8, batch_size=4, num_samples=64)


def test_an_own_model_is_counted_as_it_is() -> None:
    told = measure("--workload", f"{__name__}:make_momentum", "--data-shards", "2")
    frozen = 2 * 8 + 8
    assert told.num_parameters == told.num_trained + frozen
    assert told.memory.optimizer == told.memory.gradients == 4 * told.num_trained
    assert told.memory.parameters == 4 * told.num_parameters
    assert told.pull_bytes == 4 * told.num_trained


def test_a_step_that_fails_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match="workload: an inner step raised RuntimeError: shapes"):
        measure("--workload", f"{__name__}:make_failing", "--data-shards", "2", "--dry-run-steps", "1")


def test_weights_are_not_moved_by_looking_at_the_optimizer() -> None:
    module = nn.Linear(2, 2)
    before = [parameter.clone() for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    dry_run._memory(module, optimizer, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (13_291_520, "13.3 MB"), (2e15, "2000.0 TB")]
)
def test_sizes_are_in_units_of_a_thousand(num_bytes: float, shown: str) -> None:
    assert dry_run.size(num_bytes) == shown


@pytest.mark.integration
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_command_prints_it_and_ends(corpus: Path, form: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wadiloco", "island", "--dry-run", *SHAPE, "--data", str(corpus), *form],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    if form:
        assert json.loads(done.stdout)["num_parameters"] == PARAMETERS
    else:
        assert f"{PARAMETERS:,}, of which {PARAMETERS:,} are trained" in done.stdout
        assert "per outer sync (fp32)" in done.stdout
