"""Runs are bitwise equal: to themselves, over a pause and a continuation, and over the synchronizer's death."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import Island
from diloco.fragment import flatten_module
from diloco.schema import SyncOutcome
from diloco.transport import SynchronizerClient
from service.errors import UnavailableError
from tests.diloco.loops import Loop, close_together, loops, train_together

Serve = Callable[..., str]
Spawn = Callable[..., Any]

NUM_STEPS = 22
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"sync_every": 5},
    "int4": {"sync_every": 5, "codec": "int4"},
    "int4 overlapped": {"sync_every": 5, "codec": "int4", "overlap_steps": 2},
    "fp32 overlapped": {"sync_every": 5, "overlap_steps": 4},
}

kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def outcome(members: list[Loop]) -> list[Tensor]:
    result = [member.bits() for member in members]
    close_together(members)
    return result


def undisturbed(url: str, options: dict[str, Any]) -> list[Tensor]:
    return outcome(train_together(loops(url, **options), NUM_STEPS))


def assert_equal(result: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(result, expected, strict=True):
        assert torch.equal(mine, theirs)


@kinds
def test_a_run_equals_itself(serve: Serve, tmp_path: Path, options: dict[str, Any]) -> None:
    runs = [undisturbed(serve(tmp_path / name, quorum=2), options) for name in ("a", "b")]
    assert_equal(*runs)
    assert not torch.equal(runs[0][0], runs[0][1])  # in the middle of a round islands differ


@pytest.mark.parametrize("at_step", [4, 6, 13])
@kinds
def test_a_run_that_is_paused_and_continued_equals_one_that_is_not(
    serve: Serve, tmp_path: Path, options: dict[str, Any], at_step: int
) -> None:
    expected = undisturbed(serve(tmp_path / "a", quorum=2), options)
    url = serve(tmp_path / "b", quorum=2)
    before = train_together(loops(url, **options), at_step)
    saved = [member.saved() for member in before]
    for member in before:
        # As a process that dies: nobody finishes anything.
        member.island.__exit__(RuntimeError, None, None)
    after = loops(url, **options)
    assert all(member.continued(state) for member, state in zip(after, saved, strict=True))
    assert [member.island.num_steps for member in after] == [at_step] * 2
    assert_equal(outcome(train_together(after, NUM_STEPS)), expected)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["fp32", "int4 overlapped"])
def test_a_synchronizer_that_is_killed_changes_no_bit(serve: Serve, spawn: Spawn, tmp_path: Path, kind: str) -> None:
    options = KINDS[kind]
    expected = undisturbed(serve(tmp_path / "a", quorum=2), options)
    process = spawn(tmp_path / "b", "--quorum", "2")
    members = loops(process.url, **options)
    train_together(members, 8)
    process.kill()
    process.start()
    if "overlap_steps" in options:
        # One has contributed, the other has not, when it dies again.
        members[0].train(10)
        process.kill()
        process.start()
    assert_equal(outcome(train_together(members, NUM_STEPS)), expected)


def test_a_state_that_the_run_has_left_behind_is_continued_without_its_steps(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path)
    member = Loop(0, url, {"sync_every": 5})
    member.train(3)
    saved = member.saved()
    member.train(15)
    member.island.close()
    again = Loop(0, url, {"sync_every": 5})
    assert not again.continued(saved)
    assert torch.equal(again.bits(), member.bits())
    assert (again.island.num_steps, again.island.version, again.island.steps_since_sync) == (3, 3, 0)
    assert again.data.position == 3
    again.train(8)
    report = again.island.last_sync
    assert report is not None
    assert (report.outcome, report.inner_steps) == (SyncOutcome.APPLIED, 5)
    again.island.close()


def test_a_run_that_started_anew_does_not_take_an_old_state_for_its_own(serve: Serve, tmp_path: Path) -> None:
    member = Loop(0, serve(tmp_path / "old"), {"sync_every": 5})
    member.train(5)
    saved = member.saved()
    member.island.close()
    other = Loop(0, serve(tmp_path / "new", outer_lr=0.1), {"sync_every": 5})
    other.train(5)
    expected = other.bits()
    other.island.close()
    again = Loop(0, other.url, {"sync_every": 5})
    assert not again.continued(saved)
    assert torch.equal(again.bits(), expected)
    again.island.close()


def test_a_state_older_than_what_the_open_round_holds_is_continued_without_its_steps(
    serve: Serve, tmp_path: Path
) -> None:
    """As they are in it, they would count twice."""
    url = serve(tmp_path, quorum=2)
    options = {"sync_every": 5, "overlap_steps": 4}
    member = Loop(0, url, options)
    member.train(3)
    saved = member.saved()
    member.train(6)
    member.island.__exit__(RuntimeError, None, None)  # while the round waits for another island
    again = Loop(0, url, options)
    assert not again.continued(saved)
    assert (again.island.num_steps, again.island.version, again.island.steps_since_sync) == (3, 0, 0)
    again.island.close()


def test_a_push_whose_answer_was_lost_is_not_repeated_after_a_return_to_an_older_state(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Loop(0, serve(tmp_path, outer_lr=1.0, outer_momentum=0.0), {"sync_every": 5})
    member.train(3)
    saved = member.saved()
    with monkeypatch.context() as patch:
        patch.setattr(SynchronizerClient, "push", _no_answer)
        member.train(5)
    assert member.continued(saved)
    member.train(4)
    before = member.bits()
    report = member.island.sync()
    assert (report.outcome, report.inner_steps, member.island.steps_since_sync) == (SyncOutcome.APPLIED, 4, 0)
    assert torch.equal(member.bits(), before)
    member.island.close()


def _no_answer(*_: Any, **__: Any) -> Any:
    raise UnavailableError("no answer")


@pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed (the dev extra)")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 beside torch 2.13
def test_a_stateful_data_loader_is_continued_at_its_batch(serve: Serve, tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def train(url: str, num_steps: int, state: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Within one epoch: the next one's shuffle is another after a continuation (torchdata 0.11).
        samples = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
        loader = StatefulDataLoader(samples, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
        with Island(model, optimizer, loader, synchronizer=url, slot=0, sync_every=3) as island:
            if state is not None:
                assert island.load_state_dict(state)
            while island.num_steps < num_steps:
                for batch in loader:
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    island.step(tokens=len(batch))
                    if island.num_steps == num_steps:
                        break
            return flatten_module(model), copy.deepcopy(island.state_dict())

    expected, _ = train(serve(tmp_path / "a"), 16)
    url = serve(tmp_path / "b")
    _, state = train(url, 7)
    continued, _ = train(url, 16, state)
    assert torch.equal(continued, expected)
