"""The public island on a run whose fragments sync in turn: equal to the worker's islands, and exact over a pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import Island
from diloco.codec import codec_named
from diloco.errors import ManifestError
from diloco.fragment import flatten_module
from diloco.protocol import SyncCommand
from diloco.schema import SyncOutcome
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from service.errors import ConfigError, InputError
from tests.diloco.loops import Loop, close_together, loops, together, train_together

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]

NUM_FRAGMENTS = 3
NUM_STEPS = 26
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int4": {"codec": "int4"},
    "fp32 overlapped": {"overlap_steps": 3},
    "int4 overlapped": {"codec": "int4", "overlap_steps": 2},
}

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def options_of(kind: dict[str, Any]) -> dict[str, Any]:
    return {"sync_every": 4, "fragments": NUM_FRAGMENTS, **kind}


class Worker:
    """What a rank worker has, driven at the same steps as a loop: capture, contribute, and adopt some steps later."""

    def __init__(self, slot: int, client: SynchronizerClient, *, codec: str = "fp32", overlap_steps: int = 0) -> None:
        self.loop = Loop.plain(slot)
        self.island = StreamingIsland(self.loop.model, codec_named(codec))
        self.exchange = StreamingExchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=time.time() + 60, num_fragments=NUM_FRAGMENTS)
        self.overlap_steps = overlap_steps
        self._under_way: tuple[int, Pending] | None = None

    def train(self, num_steps: int) -> Worker:
        for step in range(1, num_steps + 1):
            self.island.count_step(self.loop.take_step())
            if self._under_way is not None:
                self._finish(step)
            elif step % 4 == 0:
                self._sync(step)
        return self

    def _sync(self, step: int) -> None:
        command = SyncCommand(epoch=0, deadline_s=time.time() + 60, overlap=self.overlap_steps > 0)
        if not self.overlap_steps:
            report = self.exchange.run(command)
            assert report is not None
            assert report.outcome is SyncOutcome.APPLIED
            return
        pending = self.exchange.begin(command, self.exchange.capture(command))
        assert isinstance(pending, Pending)
        self._under_way = (step + self.overlap_steps, pending)

    def _finish(self, step: int) -> None:
        assert self._under_way is not None
        due, pending = self._under_way
        if step >= due:
            self._under_way = None
            report = self.exchange.finish(pending, lambda: self.exchange.await_end(pending))
            assert report.outcome is SyncOutcome.APPLIED

    def bits(self) -> Tensor:
        return self.loop.bits()


def undisturbed(url: str, kind: dict[str, Any]) -> list[Tensor]:
    members = train_together(loops(url, **options_of(kind)), NUM_STEPS)
    result = [member.bits() for member in members]
    close_together(members)
    return result


def assert_equal(result: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(result, expected, strict=True):
        assert torch.equal(mine, theirs)


@kinds
def test_loops_equal_the_workers_islands_bit_for_bit(
    serve: Serve, connect: Connect, tmp_path: Path, kind: dict[str, Any]
) -> None:
    url = serve(tmp_path / "workers", quorum=2)
    workers = [Worker(slot, connect(url), **kind) for slot in range(2)]
    together([lambda worker=worker: worker.train(NUM_STEPS) for worker in workers])  # type: ignore[misc]
    assert all(fragment.version >= 1 for fragment in workers[0].island.fragments)
    assert_equal(undisturbed(serve(tmp_path / "loops", quorum=2), kind), [worker.bits() for worker in workers])


def test_a_sync_moves_one_fragment_in_turn(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, outer_lr=0.5)
    (member,) = loops(url, 1, **options_of({}))
    island = member.island
    reports = []
    for step in range(4, 29, 4):
        member.train(step)
        report = island.last_sync
        assert report is not None
        reports.append((report.round, report.inner_steps))
        assert (island.version, island.steps_since_sync) == (step // 4, 0)
    # Each fragment has been away for all the steps since its own last sync.
    assert reports == [(0, 4), (1, 8), (2, 12), (3, 12), (4, 12), (5, 12), (6, 12)]
    assert island.num_fragments == NUM_FRAGMENTS
    late = Loop(1, url)
    assert (late.island.num_fragments, late.island.version) == (NUM_FRAGMENTS, 7)
    for each in (member, late):
        each.island.close()


@pytest.mark.parametrize("at_step", [3, 5, 9, 12, 14, 17])
@kinds
def test_a_run_that_is_paused_and_continued_equals_one_that_is_not(
    serve: Serve, tmp_path: Path, kind: dict[str, Any], at_step: int
) -> None:
    expected = undisturbed(serve(tmp_path / "a", quorum=2), kind)
    url = serve(tmp_path / "b", quorum=2)
    before = train_together(loops(url, **options_of(kind)), at_step)
    saved = [member.saved() for member in before]
    for member in before:
        # As a process that dies: nobody finishes anything.
        member.island.__exit__(RuntimeError, None, None)
    # The number of fragments is the run's.
    after = loops(url, **options_of(kind) | {"fragments": None})
    assert all(member.continued(state) for member, state in zip(after, saved, strict=True))
    train_together(after, NUM_STEPS)
    assert_equal([member.bits() for member in after], expected)
    close_together(after)


def test_fragments_that_the_run_has_moved_go_on_as_they_are_now_and_the_others_as_they_were(
    serve: Serve, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1)
    (member,) = loops(url, 1, **options_of({}))
    member.train(7)
    saved, before = member.saved(), flatten_module(member.model)
    member.train(8)  # moves fragment 1
    globals_now = member.island.state_dict()["fragments"][1]["global"].clone()
    member.island.close()
    (again,) = loops(url, 1, **options_of({}))
    assert not again.continued(saved)
    sizes = [each["global"].numel() for each in again.island.state_dict()["fragments"]]
    first, second, third = torch.split(flatten_module(again.model), sizes)
    old_first, _, old_third = torch.split(before, sizes)
    assert torch.equal(first, old_first)
    assert torch.equal(third, old_third)
    assert torch.equal(second, globals_now)
    states = again.island.state_dict()["fragments"]
    assert [(each["version"], each["steps_since_sync"]) for each in states] == [(1, 3), (1, 0), (0, 7)]
    again.train(8)
    report = again.island.last_sync
    assert report is not None
    assert (report.round, report.outcome, report.inner_steps) == (2, SyncOutcome.APPLIED, 8)
    again.island.close()


def test_a_state_of_the_format_before_fragments_is_continued(serve: Serve, tmp_path: Path) -> None:
    expected = train_together(loops(serve(tmp_path / "a"), 1, overlap_steps=3), 12)
    url = serve(tmp_path / "b")
    (member,) = train_together(loops(url, 1, overlap_steps=3), 6)
    state = member.island.state_dict()
    (state["member"],) = state.pop("fragments")
    state["format"] = 1
    del state["overlapped"]["fragment"]
    member.island.__exit__(RuntimeError, None, None)
    (again,) = loops(url, 1, overlap_steps=3)
    # The module is another one: the state's tensors are the old one's.
    assert again.island.load_state_dict(state)
    again.train(12)
    assert torch.equal(again.bits(), expected[0].bits())
    close_together([again, *expected])


def test_a_state_of_other_fragments_is_refused(serve: Serve, tmp_path: Path) -> None:
    (one,) = loops(serve(tmp_path / "a"), 1)
    (several,) = loops(serve(tmp_path / "b"), 1, fragments=NUM_FRAGMENTS)
    with pytest.raises(InputError, match=r"state: has 1 fragments of .* the run has"):
        several.continued(one.saved())
    close_together([one, several])


def test_fragments_that_cannot_be_are_refused_by_name(serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path)
    (member,) = loops(url, 1, fragments=NUM_FRAGMENTS)
    with pytest.raises(ManifestError, match=r"fragments: .* it has 3 fragments against 2 here \(leave it out"):
        Loop(1, url, {"fragments": 2})
    member.island.close()
    arguments: dict[str, Any] = {"slot": 0, "sync_every": 1}
    with pytest.raises(InputError, match="fragments: 3 fragments cannot be made of 2 tensors"):
        Island(nn.Linear(2, 2), synchronizer=serve(tmp_path / "other"), fragments=3, **arguments)
    with pytest.raises(ConfigError, match=r"fragments: .*greater than or equal to 1, got 0"):
        Island(nn.Linear(2, 2), synchronizer=url, fragments=0, **arguments)
    with pytest.raises(ConfigError, match="fragments: fragments is the controller's to say"):
        Island(nn.Linear(2, 2), controller="http://127.0.0.1:9", fragments=2)
