"""The public island against a real synchronizer: what a user's loop sees of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import Island
from diloco.errors import ManifestError
from diloco.fragment import flatten_module
from diloco.schema import SyncOutcome
from service.errors import ConfigError, ConflictError, InputError, UnavailableError
from tests.diloco.conftest import REPOSITORY
from tests.diloco.loops import Loop, close_together, loops, train_together

Serve = Callable[..., str]
NOBODY = "http://127.0.0.1:9"
COMPLETE: dict[str, Any] = {"synchronizer": NOBODY, "slot": 0, "sync_every": 10, "timeout_s": 0.2}


def test_the_wire_contract_needs_no_torch() -> None:
    code = "import sys, diloco, diloco.schema; assert 'torch' not in sys.modules; from diloco import Island; Island"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Continent'"):
        from diloco import Continent  # noqa: F401


def test_islands_sync_every_so_many_steps_and_agree(serve: Serve, tmp_path: Path) -> None:
    members = loops(serve(tmp_path, quorum=2), sync_every=5)
    train_together(members, 14)
    for member in members:
        island, report = member.island, member.island.last_sync
        assert report is not None
        assert (island.version, island.num_steps, island.steps_since_sync) == (2, 14, 4)
        assert (report.outcome, report.inner_steps, report.tokens) == (SyncOutcome.APPLIED, 5, 5 * 64)
        assert island.num_tokens == 14 * 64
    train_together(members, 15)
    assert torch.equal(members[0].bits(), members[1].bits())
    close_together(members)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_every_codec_can_be_chosen(serve: Serve, tmp_path: Path, codec: str) -> None:
    (member,) = loops(serve(tmp_path), 1, codec=codec)
    member.train(5)
    assert member.island.version == 1
    assert (member.island.residual_norm is None) == (codec == "fp32")
    assert codec == "fp32" or member.island.residual_norm > 0  # type: ignore[operator]
    member.island.close()


def test_overlapped_results_are_applied_after_exactly_so_many_steps(serve: Serve, tmp_path: Path) -> None:
    (member,) = loops(serve(tmp_path), 1, sync_every=5, overlap_steps=3)
    member.train(7)
    assert (member.island.version, member.island.last_sync) == (0, None)
    member.train(8)
    assert (member.island.version, member.island.steps_since_sync) == (1, 3)
    report = member.island.last_sync
    assert report is not None
    assert (report.outcome, report.inner_steps) == (SyncOutcome.APPLIED, 5)
    assert report.blocked_s is not None
    member.train(13)
    assert (member.island.version, member.island.steps_since_sync) == (2, 3)
    member.island.close()


def test_closing_applies_a_sync_under_way_and_an_exception_does_not_wait_for_it(serve: Serve, tmp_path: Path) -> None:
    with Loop(0, serve(tmp_path / "one"), {"overlap_steps": 4}).island as island:
        island.step(1)
        for _ in range(4):
            island.step(1)
    assert island.version == 1
    url = serve(tmp_path / "two", quorum=2)
    with pytest.raises(RuntimeError, match="mine"), Loop(0, url, {"overlap_steps": 4}).island as island:  # noqa: PT012
        for _ in range(5):
            island.step(1)
        began_s = time.monotonic()
        raise RuntimeError("mine")
    assert time.monotonic() - began_s < 30
    with pytest.raises(ConflictError, match="island: is closed"):
        island.step(1)


def test_sync_takes_what_is_left_at_the_end(serve: Serve, tmp_path: Path) -> None:
    (member,) = loops(serve(tmp_path), 1, sync_every=10, overlap_steps=2)
    member.train(11)
    report = member.island.sync()
    assert (report.outcome, report.inner_steps, member.island.version) == (SyncOutcome.APPLIED, 1, 2)
    member.island.close()


def test_a_synchronizer_that_is_away_costs_a_sync_and_no_progress(spawn: Callable[..., Any], tmp_path: Path) -> None:
    process = spawn(tmp_path)
    (member,) = loops(process.url, 1, sync_every=5, timeout_s=3.0)
    member.train(4)
    process.kill()
    member.train(5)
    report = member.island.last_sync
    assert report is not None
    assert (report.outcome, member.island.steps_since_sync) == (SyncOutcome.FAILED, 5)
    member.train(9)
    process.start()
    # A machine that stands still may miss a deadline of 3 s, more than once it will not.
    reports = (member.island.sync() for _ in range(20))
    report = next(report for report in reports if report.outcome is SyncOutcome.APPLIED)
    assert (report.inner_steps, member.island.steps_since_sync) == (9, 0)
    member.island.close()


def test_the_second_island_starts_from_the_global_parameters(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path)
    (first,) = loops(url, 1)
    first.train(5)
    other = Loop(1, url)
    assert other.island.version == 1
    assert torch.equal(first.bits(), other.bits())
    for member in (first, other):
        member.island.close()


def test_everything_trains_that_a_module_may_be(serve: Serve, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.norm = nn.BatchNorm1d(4)
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(self.norm(self.frozen(x))))
            return out

    torch.manual_seed(0)
    model = Tied()
    frozen = model.frozen.weight.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with Island(model, optimizer, synchronizer=serve(tmp_path), slot=0, sync_every=2) as island:
        for _ in range(4):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=8)
        assert island.version == 2
        state = island.state_dict()
    assert flatten_module(model).numel() == state["fragments"][0]["global"].numel() == 4 + 4 + 16
    assert torch.equal(model.frozen.weight, frozen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync_every": 0}, "sync_every: .*greater than or equal to 1, got 0"),
        ({"sync_every": None}, r"sync_every: sync_every is missing \(give the inner steps between syncs"),
        ({"slot": None}, "slot: slot is missing"),
        ({"synchronizer": None}, "synchronizer: synchronizer is missing"),
        ({"synchronizer": "127.0.0.1:9600"}, "synchronizer: .*got '127.0.0.1:9600'"),
        ({"overlap_steps": 10}, "overlap_steps: overlap_steps 10 is not below sync_every 10"),
        ({"codec": "int2"}, "codec: .*got 'int2'"),
        ({"controller": "http://127.0.0.1:8"}, "sync_every"),
        ({"token": " "}, "token: token is empty"),
        ({"tls_cert": Path("/nowhere")}, "tls_cert: "),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Island(nn.Linear(2, 2), **{**COMPLETE, **change})


def test_modules_and_data_that_cannot_be_synced_are_refused() -> None:
    with pytest.raises(InputError, match=r"module: parameter bias is bfloat16, .*autocast"):
        Island(nn.Linear(2, 2).bfloat16(), **COMPLETE)
    with pytest.raises(InputError, match="module: has no parameters to train"):
        Island(nn.Linear(2, 2).requires_grad_(False), **COMPLETE)
    with pytest.raises(InputError, match="module: parameter bias has no shape yet"):
        Island(nn.LazyLinear(2), **COMPLETE)
    with pytest.raises(InputError, match=r"data: a list has no state_dict .*StatefulDataLoader"):
        Island(nn.Linear(2, 2), None, [1, 2], **COMPLETE)  # type: ignore[arg-type]


def test_nobody_to_join_is_told_with_the_remedy() -> None:
    with pytest.raises(UnavailableError, match=r"synchronizer: http://127.0.0.1:9.* \(start it there"):
        Island(nn.Linear(2, 2), **COMPLETE)


def test_another_model_is_told_with_the_difference(serve: Serve, tmp_path: Path) -> None:
    arguments = {**COMPLETE, "synchronizer": serve(tmp_path), "timeout_s": 30.0}
    Island(nn.Linear(2, 2), **arguments).close()
    with pytest.raises(ManifestError, match=r"module: differs from the run's: parameter 1 is weight \[2, 2\]"):
        Island(nn.Linear(3, 2), **arguments)


def test_a_step_without_tokens_is_refused(serve: Serve, tmp_path: Path) -> None:
    with Loop(0, serve(tmp_path)).island as island, pytest.raises(InputError, match="tokens: is 0"):
        island.step(0)


def test_a_state_of_another_slot_or_model_is_refused(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path)
    members = loops(url, 2)
    state = members[1].island.state_dict()
    with pytest.raises(InputError, match="state: is that of slot 1, this is slot 0"):
        members[0].island.load_state_dict(state)
    with pytest.raises(InputError, match="state: is not what state_dict returns"):
        members[0].island.load_state_dict({"model": {}})
    close_together(members)
    other = Island(nn.Linear(2, 2), synchronizer=serve(tmp_path / "other"), slot=1, sync_every=1)
    with pytest.raises(InputError, match=r"state: has .* parameters, the module has 6"):
        other.load_state_dict(state)
    other.close()


def test_no_thread_outlives_an_island(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path)
    before = set(threading.enumerate())
    (member,) = loops(url, 1, overlap_steps=2)
    member.train(20)
    member.island.close()
    # Those of the synchronizer, which is in this process, are not the island's.
    for thread in {thread for thread in set(threading.enumerate()) - before if thread.name == "sync"}:
        thread.join(10)
        assert not thread.is_alive(), thread
