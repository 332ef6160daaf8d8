"""Rounds of an island in this process against a real synchronizer over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.data import TokenStream
from diloco.exchange import Exchange
from diloco.fragment import flatten_module, unflatten_into
from diloco.inner import InnerConfig, InnerLoop
from diloco.island import Island
from diloco.model import ModelSize, build_model
from diloco.protocol import SyncCommand
from diloco.schema import SyncOutcome, SyncReport
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from service.errors import UnavailableError

SIZE = 6
PLAIN_AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0, "grace_max_s": 0.0}

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def soon() -> float:
    return time.time() + 20


def train(island: Island, change: float, *, tokens: int = 10) -> None:
    unflatten_into(flatten_module(island.module) + change, island.module)
    island.count_step(tokens)


def local(island: Island) -> Tensor:
    return flatten_module(island.module)


class Member:
    """An island of six parameters that joined a run."""

    def __init__(self, client: SynchronizerClient, *, slot: int = 0) -> None:
        module = nn.Linear(SIZE - 1, 1)
        unflatten_into(torch.arange(SIZE, dtype=torch.float32), module)
        self.island = Island(module)
        self.client = client
        self.exchange = Exchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=soon())

    def try_sync(self, round_number: int | None = None, *, wait_s: float = 20.0) -> SyncReport | None:
        return self.exchange.run(SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + wait_s))

    def sync(self, round_number: int | None = None, *, wait_s: float = 20.0) -> SyncReport:
        report = self.try_sync(round_number, wait_s=wait_s)
        assert report is not None
        return report


class LostAnswers(SynchronizerClient):
    """Its next push arrives, but the answer is lost."""

    lose_next = True

    def push(self, *arguments: Any, **keywords: Any) -> Any:
        reply = super().push(*arguments, **keywords)
        if self.lose_next:
            self.lose_next = False
            raise UnavailableError("the answer was lost")
        return reply


def contribute(client: SynchronizerClient, value: float, *, round_number: int, slot: int) -> None:
    """What another island would do."""
    flat = torch.full((SIZE,), value)
    client.push(flat, round=round_number, slot=slot, epoch=0, tokens=10, deadline_s=soon())


def test_the_first_island_offers_and_the_next_pulls(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    first = Member(connect(url))
    train(first.island, 1.0)
    first.sync()
    second = Member(connect(url), slot=1)
    assert second.island.version == 1
    assert torch.equal(local(second.island), torch.arange(SIZE) + 1.0)


def test_a_closed_round_is_late_and_keeps_the_progress(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)

    class Overtaken(SynchronizerClient):
        """Another island closes the round between our look at the state and our push."""

        def push(self, *arguments: Any, **keywords: Any) -> Any:
            if keywords["round"] == 0:
                contribute(connect(url), 50.0, round_number=0, slot=1)
                connect(url).wait_version(0, deadline_s=soon())
            return super().push(*arguments, **keywords)

    member = Member(Overtaken(connect(url)._http))
    train(member.island, 2.0)
    report = member.sync(0)
    assert (report.outcome, report.round, report.pushed_s) == (SyncOutcome.LATE, 0, None)
    assert torch.allclose(local(member.island), torch.full((SIZE,), 52.0))
    assert (member.island.version, member.island.steps_since_sync) == (1, 1)
    assert member.sync(1).outcome is SyncOutcome.APPLIED
    assert torch.allclose(local(member.island), torch.full((SIZE,), 52.0))


def test_a_push_whose_answer_was_lost_counts_once(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(LostAnswers(connect(url)._http))
    train(member.island, 2.0)
    assert member.sync(0).outcome is SyncOutcome.FAILED
    train(member.island, 1.0)
    connect(url).wait_version(0, deadline_s=soon())
    report = member.sync(0)
    assert (report.outcome, report.round, report.inner_steps) == (SyncOutcome.APPLIED, 0, 1)
    assert torch.allclose(local(member.island), torch.arange(SIZE) + 3.0)
    assert (member.island.version, member.island.steps_since_sync) == (1, 1)


def test_newer_progress_replaces_a_contribution_whose_round_is_still_open(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    member = Member(connect(url))
    train(member.island, 2.0)
    assert member.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    train(member.island, 2.0)
    assert member.sync(0, wait_s=0.3).inner_steps == 2
    contribute(connect(url), 0.0, round_number=0, slot=1)
    report = member.sync(0)
    assert (report.outcome, report.inner_steps, report.tokens) == (SyncOutcome.APPLIED, 2, 20)
    # Weights are tokens: 20 of ours, 10 of the other's.
    torch.testing.assert_close(local(member.island), (torch.arange(SIZE) + 4.0) * 2 / 3)


def test_a_command_for_a_round_that_is_over_does_nothing(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    member = Member(connect(serve(tmp_path, quorum=1)))
    train(member.island, 1.0)
    member.sync(0)
    before = local(member.island)
    assert member.try_sync(0) is None
    assert torch.equal(local(member.island), before)


def test_an_island_that_missed_a_round_catches_up_and_contributes(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(connect(url))
    train(member.island, 2.0)
    contribute(connect(url), 10.0, round_number=0, slot=1)
    connect(url).wait_version(0, deadline_s=soon())
    report = member.sync(1)
    assert (report.outcome, report.round) == (SyncOutcome.APPLIED, 1)
    assert torch.allclose(local(member.island), torch.full((SIZE,), 12.0))
    assert (member.island.version, member.island.steps_since_sync) == (2, 0)


def test_parameters_that_are_not_finite_stay_on_the_island_and_are_replaced(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1)
    member = Member(connect(url))
    train(member.island, float("nan"))
    report = member.sync(0)
    assert report.outcome is SyncOutcome.FAILED
    assert "not finite" in report.detail
    assert connect(url).state(deadline_s=soon()).fragments[0].open_round.slots == ()
    assert torch.equal(local(member.island), torch.arange(SIZE, dtype=torch.float32))


def test_an_island_that_trained_on_nothing_still_completes_the_quorum(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1)))
    assert member.sync(0).outcome is SyncOutcome.APPLIED


def test_a_worker_that_starts_again_in_an_open_round_leaves_the_progress_of_the_one_before_in_it(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    before = Member(connect(url))
    train(before.island, 2.0)
    assert before.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    after = Member(connect(url))
    assert after.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    train(after.island, 1.0)
    contribute(connect(url), 0.0, round_number=0, slot=1)
    report = after.sync(0)
    assert (report.outcome, report.round, report.bytes_pushed) == (SyncOutcome.APPLIED, 0, 0)
    assert torch.allclose(local(after.island), (torch.arange(SIZE) + 2.0) / 2 + 1.0)
    assert after.island.steps_since_sync == 1


def test_a_synchronizer_that_lost_its_disk_is_given_what_the_islands_share(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path / "old", quorum=1, **PLAIN_AVERAGE)))
    train(member.island, 2.0)
    member.sync(0)
    train(member.island, 1.0)
    replacement = connect(serve(tmp_path / "new", quorum=1, **PLAIN_AVERAGE))
    exchange = Exchange(member.island, replacement, slot=0)
    report = exchange.run(SyncCommand(round=None, epoch=0, deadline_s=soon()))
    assert report is not None
    assert (report.outcome, report.round) == (SyncOutcome.APPLIED, 0)
    assert torch.equal(local(member.island), torch.arange(SIZE) + 3.0)


def overtaken(url: str, connect: Connect, **settings: Any) -> Member:
    """An island with progress from version 0 that has not seen that version 1 is there."""
    member = Member(connect(url))
    train(member.island, 2.0)
    contribute(connect(url), 10.0, round_number=0, slot=1)
    connect(url).wait_version(0, deadline_s=soon())
    return member


STALE = PLAIN_AVERAGE | {"max_staleness": 2}


def test_a_late_island_contributes_all_the_same_and_goes_on_from_the_current_parameters(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **STALE)
    member = overtaken(url, connect)
    report = member.sync(0)
    assert (report.outcome, report.round, report.staleness) == (SyncOutcome.STALE, 0, 1)
    assert report.staleness_weight == pytest.approx(2**-0.5)
    assert member.island.version == 1
    torch.testing.assert_close(local(member.island), torch.full((SIZE,), 12.0))
    # It trains on, and another island closes the round that its progress rides along in.
    train(member.island, 1.0)
    contribute(connect(url), 20.0, round_number=1, slot=1)
    connect(url).wait_version(1, deadline_s=soon())
    merged = (10 * 10.0 + 10 * 2**-0.5 * 2.0) / 20  # what 10 + delta comes to, above 10
    expected = 10.0 + merged
    report = member.sync(2)
    assert (report.outcome, report.round, report.inner_steps) == (SyncOutcome.APPLIED, 2, 1)
    # Version 2 and the one step that it does not have; what was merged is not added again.
    torch.testing.assert_close(local(member.island), torch.full((SIZE,), expected + 1.0))


def test_newer_progress_of_a_late_island_replaces_what_rides_along(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **STALE)
    member = overtaken(url, connect)
    assert member.sync(0).outcome is SyncOutcome.STALE
    report = member.sync(1)
    assert (report.outcome, report.round, report.staleness, report.inner_steps) == (SyncOutcome.APPLIED, 1, 0, 1)
    torch.testing.assert_close(local(member.island), torch.full((SIZE,), 12.0))
    assert (member.island.version, member.island.steps_since_sync) == (2, 0)


def test_a_late_push_whose_answer_was_lost_counts_once(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, **STALE)
    member = Member(LostAnswers(connect(url)._http))
    train(member.island, 2.0)
    contribute(connect(url), 10.0, round_number=0, slot=1)
    connect(url).wait_version(0, deadline_s=soon())
    assert member.sync(0).outcome is SyncOutcome.FAILED
    contribute(connect(url), 10.0, round_number=1, slot=1)
    connect(url).wait_version(1, deadline_s=soon())
    g = connect(url)
    now = torch.empty(SIZE)
    g.pull(2, now, deadline_s=soon())
    report = member.sync(2)
    assert report.outcome is SyncOutcome.APPLIED
    # Nothing was left to contribute: the lost one is in version 2.
    assert (report.inner_steps, member.island.steps_since_sync) == (0, 0)
    torch.testing.assert_close(local(member.island), now)


def test_a_late_island_tells_how_late_it_is_although_it_contributes_nothing(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **(PLAIN_AVERAGE | {"grace_max_s": 1000.0}))
    member = overtaken(url, connect)

    def grace_s() -> float:
        text = connect(url)._http.get("/metrics").text
        name = "wadiloco_synchronizer_grace_seconds"
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))

    assert grace_s() == 1000.0
    assert member.try_sync(0) is None
    # The next round is alone with the one who made the last: it waits for both, and for how long is known now.
    contribute(connect(url), 20.0, round_number=1, slot=1)
    state = connect(url).state(deadline_s=soon()).fragments[0].open_round
    assert state.grace_until_s is not None
    assert state.opened_s is not None
    assert state.grace_until_s - state.opened_s < 100.0


def test_an_island_too_far_behind_keeps_its_progress_and_adopts(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, **(STALE | {"max_staleness": 1}))
    member = overtaken(url, connect)
    contribute(connect(url), 20.0, round_number=1, slot=1)
    connect(url).wait_version(1, deadline_s=soon())
    assert member.try_sync(0) is None
    assert (member.island.version, member.island.steps_since_sync) == (2, 1)
    torch.testing.assert_close(local(member.island), torch.full((SIZE,), 22.0))


def test_an_island_trains_on_between_its_push_and_the_end_of_the_round(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    member = Member(connect(url))
    train(member.island, 2.0)
    pending = member.exchange.begin(SyncCommand(round=0, epoch=0, deadline_s=soon(), overlap=True))
    assert isinstance(pending, Pending)
    train(member.island, 1.0)
    contribute(connect(url), 0.0, round_number=0, slot=1)
    version = member.exchange.await_end(pending)
    train(member.island, 1.0)
    report = member.exchange.finish(pending, lambda: version)
    assert (report.outcome, report.inner_steps) == (SyncOutcome.APPLIED, 1)
    torch.testing.assert_close(local(member.island), (torch.arange(SIZE) + 2.0) / 2 + 2.0)
    assert (member.island.version, member.island.steps_since_sync) == (1, 2)


def test_a_round_that_stays_open_while_the_island_trains_on_fails_at_its_deadline(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path, quorum=2, **PLAIN_AVERAGE)))
    train(member.island, 2.0)
    pending = member.exchange.begin(SyncCommand(round=0, epoch=0, deadline_s=time.time() + 0.3, overlap=True))
    assert isinstance(pending, Pending)
    report = member.exchange.finish(pending, lambda: member.exchange.await_end(pending))
    assert (report.outcome, report.detail) == (SyncOutcome.FAILED, "round still open at the deadline")
    assert member.island.accepted is not None


@pytest.mark.parametrize("num_rounds", [12])
def test_one_island_equals_plain_training_bit_for_bit_over_the_wire(
    num_rounds: int, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    size = ModelSize(num_layers=1, num_heads=2, width=16, context=8)
    corpus = torch.randint(0, 256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def parts() -> tuple[nn.Module, InnerLoop, TokenStream]:
        module = build_model(size, seed=0)
        stream = TokenStream(corpus, slot=0, num_shards=1, seed=0, batch_size=2, length=size.context)
        return module, InnerLoop(module, InnerConfig(warmup_steps=0, lr=1e-2)), stream

    plain, plain_loop, plain_stream = parts()
    module, loop, stream = parts()
    island = Island(module)
    exchange = Exchange(island, connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE)), slot=0)
    exchange.join(deadline_s=soon())
    for round_number in range(num_rounds):
        plain_loop.take_step(plain_stream.next_batch())
        loop.take_step(stream.next_batch())
        island.count_step(16)
        report = exchange.run(SyncCommand(round=round_number, epoch=0, deadline_s=soon()))
        assert report is not None
        assert report.outcome is SyncOutcome.APPLIED
    assert torch.equal(flatten_module(module).view(torch.int32), flatten_module(plain).view(torch.int32))
