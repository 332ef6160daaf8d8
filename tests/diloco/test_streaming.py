"""Islands whose fragments sync in turn, in this process, against a real synchronizer over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.codec import CODECS
from diloco.data import TokenStream
from diloco.errors import ManifestError, RoundClosedError
from diloco.fragment import flatten_module, unflatten_into
from diloco.inner import InnerConfig, InnerLoop
from diloco.island import Island
from diloco.model import ModelSize, build_model
from diloco.outer import Contribution, OuterOptimizer
from diloco.protocol import SyncCommand
from diloco.schema import SyncOutcome, SyncReport
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from service.errors import InputError, UnavailableError

PLAIN_AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0, "grace_max_s": 0.0}
NUM_FRAGMENTS = 3
SIZE = 15
"""Elements of `model`, whose fragments have 4, 5 and 6."""

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def model() -> nn.Module:
    module = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(size)) for name, size in zip("abc", (4, 5, 6), strict=True)}
    )
    unflatten_into(torch.arange(SIZE, dtype=torch.float32), module)
    return module


def soon() -> float:
    return time.time() + 20


class Member:
    """An island that joined a run."""

    def __init__(
        self,
        client: SynchronizerClient,
        *,
        slot: int = 0,
        num_fragments: int | None = NUM_FRAGMENTS,
        module: nn.Module | None = None,
        codec: str = "fp32",
    ) -> None:
        self.island = StreamingIsland(module or model(), CODECS[codec])  # type: ignore[index]
        self.client = client
        self.slot = slot
        self.exchange = StreamingExchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=soon(), num_fragments=num_fragments)

    def train(self, change: float, *, tokens: int = 10) -> None:
        unflatten_into(self.local + change, self.island.module)
        self.island.count_step(tokens)

    def try_sync(self, round_number: int | None = None, *, wait_s: float = 20.0) -> SyncReport | None:
        return self.exchange.run(self.order(round_number, wait_s=wait_s))

    def sync(self, round_number: int | None = None, *, wait_s: float = 20.0) -> SyncReport:
        report = self.try_sync(round_number, wait_s=wait_s)
        assert report is not None
        return report

    def begin(self, round_number: int) -> Pending:
        begun = self.exchange.begin(self.order(round_number))
        assert isinstance(begun, Pending)
        return begun

    def end(self, pending: Pending) -> SyncReport:
        return self.exchange.finish(pending, lambda: self.exchange.await_end(pending))

    def order(self, round_number: int | None, *, wait_s: float = 20.0) -> SyncCommand:
        return SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + wait_s)

    @property
    def local(self) -> Tensor:
        return flatten_module(self.island.module)

    @property
    def versions(self) -> list[int]:
        return [fragment.version for fragment in self.island.fragments]


def contribute(client: SynchronizerClient, value: float, *, fragment: int, version: int, slot: int) -> None:
    """What another island would do."""
    flat = torch.full((4 + fragment,), value)
    client.of(fragment).push(flat, round=version, slot=slot, epoch=0, tokens=10, deadline_s=soon())


def versions_at(client: SynchronizerClient) -> list[int]:
    return [fragment.version for fragment in client.state(deadline_s=soon()).fragments]


def global_at(client: SynchronizerClient) -> Tensor:
    """The global parameters that the synchronizer has, newest versions."""
    parts = []
    for fragment in client.state(deadline_s=soon()).fragments:
        flat = torch.empty(fragment.num_bytes // 4)
        client.of(fragment.fragment).pull(fragment.version, flat, deadline_s=soon())
        parts.append(flat)
    return torch.cat(parts)


# Pure: no synchronizer.

TINY = ModelSize(num_layers=2, num_heads=2, width=32, context=16)
NUM_ISLANDS = 2


class Trainee:
    """An island that trains on its own part of the data."""

    def __init__(self, slot: int, num_fragments: int) -> None:
        corpus = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        self._stream = TokenStream(corpus, slot=slot, num_shards=NUM_ISLANDS, seed=0, batch_size=4, length=TINY.context)
        module = build_model(TINY, seed=0)
        self.island = StreamingIsland(module, num_fragments=num_fragments)
        self._inner = InnerLoop(module, InnerConfig(warmup_steps=5, lr=3e-3))

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._inner.take_step(self._stream.next_batch())
            self.island.count_step(64)


def optimizer_of(island: Island) -> OuterOptimizer:
    return OuterOptimizer(island.global_flat.clone(), torch.zeros_like(island.global_flat), lr=0.7, mu=0.9)


def sync_at_once(islands: Sequence[Island], outer: OuterOptimizer) -> None:
    """All islands of a fragment leave it and join it at this moment."""
    for island in islands:
        island.accepted = island.contribution()
    given = [island.accepted for island in islands if island.accepted is not None]
    outer.propose({slot: Contribution(local=one.local, tokens=one.tokens) for slot, one in enumerate(given)})
    outer.commit()
    for island in islands:
        island.adopt(outer.parameters, island.version + 1)


def train_together(num_fragments: int) -> Tensor:
    """Parameters after rounds in which every fragment syncs at the same moment."""
    trainees = [Trainee(slot, num_fragments) for slot in range(NUM_ISLANDS)]
    outers = [optimizer_of(fragment) for fragment in trainees[0].island.fragments]
    for _ in range(4):
        for trainee in trainees:
            trainee.train(5)
        for index, outer in enumerate(outers):
            sync_at_once([trainee.island.fragments[index] for trainee in trainees], outer)
        first, second = (flatten_module(trainee.island.module) for trainee in trainees)
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    return first


@pytest.mark.parametrize("num_fragments", [2, 3, 7])
def test_fragments_that_sync_at_the_same_moment_are_the_whole_model_bit_for_bit(num_fragments: int) -> None:
    assert torch.equal(train_together(num_fragments).view(torch.int32), train_together(1).view(torch.int32))


def test_progress_is_counted_for_each_fragment_and_told_since_the_last_sync_of_any() -> None:
    island = StreamingIsland(model(), num_fragments=3)
    island.count_step(10)
    first = island.fragments[0]
    first.accepted = first.contribution()
    first.adopt(first.accepted.local, 1)
    assert [fragment.steps_since_sync for fragment in island.fragments] == [0, 1, 1]
    assert (island.steps_since_sync, island.tokens_since_sync, island.version) == (0, 0, 1)
    island.count_step(10)
    assert (island.steps_since_sync, island.tokens_since_sync) == (1, 10)
    assert [fragment.tokens_since_sync for fragment in island.fragments] == [10, 20, 20]


def test_the_norm_is_that_of_the_whole_model() -> None:
    whole, cut = StreamingIsland(model()), StreamingIsland(model(), num_fragments=3)
    for island in (whole, cut):
        unflatten_into(torch.linspace(-1, 1, SIZE), island.module)
    assert cut.update_norm() == pytest.approx(whole.update_norm(), rel=1e-6)
    assert whole.update_norm() == whole.fragments[0].update_norm()
    assert torch.equal(cut.global_flat, whole.global_flat)


class Tied(nn.Module):
    """Has a weight twice, one that is frozen, one without elements, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(9), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.rest = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.ones(5))


def test_what_is_tied_travels_once_and_what_is_frozen_or_a_buffer_does_not() -> None:
    island = StreamingIsland(Tied(), num_fragments=2)
    assert [[spec.name for spec in manifest.tensors] for manifest in island.manifests] == [
        ["embedding.weight", "nothing"],
        ["rest"],
    ]
    assert [fragment.global_flat.numel() for fragment in island.fragments] == [6, 4]
    with pytest.raises(InputError, match="2 tensors"):
        island.cut(3)


# Against a synchronizer.


def test_fragments_advance_in_turn_and_islands_end_with_the_same_globals(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, outer_lr=0.7, outer_momentum=0.9, grace_max_s=0.0)
    members = [Member(connect(url), slot=slot) for slot in range(2)]
    for number in range(7):
        for member in members:
            member.train(0.1 * (member.slot + 1))
        pending = members[0].begin(number)
        report = members[1].sync(number)
        done = members[0].end(pending)
        fragment = number % 3
        assert [(r.outcome, r.round) for r in (report, done)] == [(SyncOutcome.APPLIED, number)] * 2
        assert report.bytes_pushed == report.bytes_pulled == 4 * (4 + fragment)
        assert report.inner_steps == min(number + 1, 3)
        assert members[0].versions == versions_at(members[0].client)
        assert [member.island.version for member in members] == [number + 1] * 2
    assert members[0].versions == [3, 2, 2]
    first_flat, second_flat = (member.island.global_flat for member in members)
    assert torch.equal(first_flat.view(torch.int32), second_flat.view(torch.int32))
    assert torch.equal(first_flat, global_at(members[0].client))


def test_a_sync_touches_the_parameters_of_its_fragment_alone(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, outer_lr=0.5, outer_momentum=0.0)))
    member.train(2.0)
    before = member.local
    member.sync(0)
    assert torch.equal(member.local[4:], before[4:])
    assert torch.allclose(member.local[:4], before[:4] - 1.0)
    assert torch.equal(member.island.global_flat[4:], torch.arange(4.0, SIZE))


def test_the_next_island_takes_over_the_number_and_the_state_of_all_fragments(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    first = Member(connect(url))
    for number in range(4):
        first.train(1.0)
        first.sync(number)
    second = Member(connect(url), slot=1, num_fragments=None)
    assert second.versions == [2, 1, 1]
    assert second.island.version == 4
    assert torch.equal(second.local, global_at(first.client))
    assert second.island.steps_since_sync == 0


def test_an_island_that_nobody_directs_takes_the_fragment_whose_turn_it_is(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(connect(url))
    other = Member(connect(url), slot=1)
    for number in range(5):
        member.train(1.0)
        assert member.sync().round == number
    other.train(1.0)
    # It was away for five rounds: all that it missed is one sync away.
    report = other.sync()
    assert (report.round, report.outcome) == (5, SyncOutcome.APPLIED)
    assert other.versions == versions_at(other.client) == [2, 2, 2]


def test_what_an_island_missed_of_other_fragments_is_adopted_with_its_progress_kept(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(connect(url))
    member.train(2.0)
    contribute(connect(url), 50.0, fragment=0, version=0, slot=1)
    connect(url).wait_version(0, deadline_s=soon())
    report = member.sync(1)
    assert (report.round, report.outcome, report.bytes_pulled) == (1, SyncOutcome.APPLIED, 4 * (4 + 5))
    assert torch.allclose(member.local[:4], torch.full((4,), 52.0))
    assert member.island.fragments[0].steps_since_sync == 1
    assert member.island.version == 2


def test_a_round_that_is_over_is_skipped_and_nothing_is_contributed(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member, late = Member(connect(url)), Member(connect(url), slot=1)
    for number in range(2):
        member.train(1.0)
        member.sync(number)
    late.train(1.0)
    assert late.try_sync(0) is None
    assert late.versions == versions_at(late.client) == [1, 1, 0]
    assert late.island.fragments[0].steps_since_sync == 1


def test_a_round_that_closes_on_the_way_is_late_for_its_fragment_alone(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)

    class Overtaken(SynchronizerClient):
        """Another island closes the round between our look at the state and our push."""

        def push(self, *arguments: Any, **keywords: Any) -> Any:
            if keywords["slot"] == 0 and self._index == 0:
                contribute(connect(url), 50.0, fragment=0, version=0, slot=1)
                connect(url).wait_version(0, deadline_s=soon())
            return super().push(*arguments, **keywords)

    member = Member(Overtaken(connect(url)._http))
    member.train(2.0)
    report = member.sync(0)
    assert (report.outcome, report.round) == (SyncOutcome.LATE, 0)
    assert torch.allclose(member.local[:4], torch.full((4,), 52.0))
    assert torch.equal(member.local[4:], torch.arange(4.0, SIZE) + 2.0)
    assert member.sync(1).outcome is SyncOutcome.APPLIED


class LostAnswers(SynchronizerClient):
    """Its next push arrives, but the answer is lost."""

    lose = [True]  # noqa: RUF012  (shared by the clients of all fragments)

    def push(self, *arguments: Any, **keywords: Any) -> Any:
        reply = super().push(*arguments, **keywords)
        if self.lose:
            self.lose.clear()
            raise UnavailableError("the answer was lost")
        return reply


def test_a_push_whose_answer_was_lost_counts_once_also_when_another_fragment_is_next(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    LostAnswers.lose = [True]
    member = Member(LostAnswers(connect(url)._http))
    member.train(2.0)
    assert member.sync(0).outcome is SyncOutcome.FAILED
    connect(url).wait_version(0, deadline_s=soon())
    member.train(1.0)
    assert (report := member.sync(1)).outcome is SyncOutcome.APPLIED
    assert report.round == 1
    assert torch.allclose(member.local, torch.arange(SIZE) + 3.0)
    assert member.island.fragments[0].steps_since_sync == 1
    assert member.island.version == 2


def test_a_contribution_whose_round_outlives_the_deadline_is_adopted_with_a_later_fragment(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    member = Member(connect(url))
    member.train(2.0)
    report = member.sync(0, wait_s=0.3)
    assert (report.outcome, report.detail) == (SyncOutcome.FAILED, "round still open at the deadline")
    contribute(connect(url), 0.0, fragment=0, version=0, slot=1)
    contribute(connect(url), 0.0, fragment=1, version=0, slot=1)
    assert connect(url).wait_version(0, deadline_s=soon()) == 1
    member.train(1.0)
    assert member.sync(1).outcome is SyncOutcome.APPLIED
    # (0 + 2 + x) / 2 for the contribution, and the progress made since.
    assert torch.allclose(member.local[:4], torch.arange(4.0) / 2 + 1.0 + 1.0)
    assert member.island.fragments[0].steps_since_sync == 1


def test_a_worker_that_starts_again_leaves_in_the_open_round_what_the_one_before_gave_to_its_fragment(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    before = Member(connect(url))
    before.train(2.0)
    assert before.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    after = Member(connect(url))
    after.train(1.0)
    pending = after.begin(0)
    contribute(connect(url), 0.0, fragment=0, version=0, slot=1)
    report = after.end(pending)
    assert (report.outcome, report.round, report.inner_steps) == (SyncOutcome.APPLIED, 0, 0)
    assert torch.allclose(after.local[:4], torch.arange(4.0) / 2 + 1.0 + 1.0)
    assert [fragment.steps_since_sync for fragment in after.island.fragments] == [1, 1, 1]


def test_a_synchronizer_that_lost_everything_is_given_all_fragments_again(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    first = connect(serve(tmp_path / "first", quorum=1, **PLAIN_AVERAGE))
    member = Member(first)
    for number in range(4):
        member.train(1.0)
        member.sync(number)
    shared = member.island.global_flat.clone()
    second = connect(serve(tmp_path / "second", quorum=1, **PLAIN_AVERAGE))
    again = StreamingExchange(member.island, second, slot=0)
    member.train(1.0)
    # The controller goes on counting, the synchronizer begins anew: the island does what is next there.
    report = again.run(member.order(4))
    assert report is not None
    assert (report.outcome, report.round) == (SyncOutcome.APPLIED, 0)
    assert versions_at(second) == member.versions == [1, 0, 0]
    assert torch.equal(member.island.global_flat[4:], shared[4:])
    assert torch.allclose(member.local, torch.arange(SIZE) + 5.0)


def test_another_number_of_fragments_than_the_run_has_is_refused(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1)
    Member(connect(url))
    with pytest.raises(ManifestError, match="it has 3 fragments against 2 here") as caught:
        Member(connect(url), num_fragments=2)
    assert caught.value.field == "num_fragments"
    assert "--num-fragments 3" in str(caught.value.remedy)


def test_another_model_is_refused_with_the_first_difference(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1)
    Member(connect(url))
    with pytest.raises(ManifestError, match="parameter 0 is a"):
        Member(connect(url), module=nn.Linear(4, 4), num_fragments=None)


def test_a_model_with_fewer_tensors_than_fragments_begins_no_run(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1)
    with pytest.raises(InputError, match="4 fragments cannot be made of 3 tensors"):
        Member(connect(url), num_fragments=4)
    assert not connect(url).state(deadline_s=soon()).initialized


def test_of_two_islands_that_begin_at_once_the_second_takes_over_what_the_first_decided(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1)

    class Slow(SynchronizerClient):
        """Between its look at the state and its offer another island begins the run."""

        def offer(self, *arguments: Any, **keywords: Any) -> Any:
            Member(connect(url))
            return super().offer(*arguments, **keywords)

    member = Member(Slow(connect(url)._http), slot=1, num_fragments=None)
    assert member.island.num_fragments == 3


def test_parameters_that_are_not_finite_are_given_up_in_all_fragments(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE)), codec="int8")
    unflatten_into(torch.full((SIZE,), float("nan")), member.island.module)
    member.island.count_step(10)
    assert member.sync(0).outcome is SyncOutcome.FAILED
    assert torch.equal(member.local, torch.arange(SIZE, dtype=torch.float32))
    assert member.island.steps_since_sync == 0


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_what_a_codec_leaves_out_is_owed_by_each_fragment(
    serve: Serve, connect: Connect, tmp_path: Path, codec: str
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE)), codec=codec)
    for number in range(2 * NUM_FRAGMENTS):
        unflatten_into(member.local + torch.linspace(0.013, 0.7, SIZE), member.island.module)
        member.island.count_step(10)
        assert member.sync(number).outcome is SyncOutcome.APPLIED
    owed = torch.cat([f.feedback.residual for f in member.island.fragments if f.feedback is not None])
    assert owed.norm() > 0
    assert member.island.residual_norm == pytest.approx(owed.norm().item(), rel=1e-5)
    # Pseudo-gradients point backwards: what is owed has yet to be subtracted. Nothing of the progress is lost.
    progress = 2 * NUM_FRAGMENTS * torch.linspace(0.013, 0.7, SIZE)
    assert torch.allclose(member.local - owed, torch.arange(SIZE) + progress, atol=1e-5)


def test_stale_contributions_are_taken_within_their_fragment(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, max_staleness=1, **PLAIN_AVERAGE)
    member = Member(connect(url))
    member.train(2.0)
    contribute(connect(url), 50.0, fragment=0, version=0, slot=1)
    connect(url).wait_version(0, deadline_s=soon())
    report = member.sync(0)
    assert (report.outcome, report.round, report.staleness) == (SyncOutcome.STALE, 0, 1)
    state = connect(url).state(deadline_s=soon())
    assert [fragment.open_round.slots for fragment in state.fragments] == [(0,), (), ()]


def test_fragments_do_not_fence_or_close_each_other(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(connect(url))
    contribute(member.client, 1.0, fragment=2, version=0, slot=5)
    assert member.client.of(2).wait_version(0, deadline_s=soon()) == 1
    assert versions_at(member.client) == [0, 0, 1]
    with pytest.raises(RoundClosedError):
        contribute(member.client, 1.0, fragment=2, version=0, slot=6)
    # Out of turn: what is next is still the first round that has not been.
    member.train(1.0)
    assert [member.sync().round for _ in range(3)] == [0, 1, 3]
    assert member.versions == [2, 1, 1]
