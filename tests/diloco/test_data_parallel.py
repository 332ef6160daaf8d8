"""An island of several ranks trains as one rank does on the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from diloco.gradient_average import bucket_bounds
from diloco.inner import InnerConfig, adamw
from diloco.sharded_optimizer import share_out
from diloco.team import Team
from diloco.workload import Part, Shard, Workload, batches_in_turn
from tests.diloco.rank_process import CorpusText, Ranks, Trained, all_do, train

NUM_STEPS = 30


@pytest.mark.integration
def test_two_ranks_on_half_batches_equal_one_on_the_whole(ranks: Ranks) -> None:
    alone = train(Team(), NUM_STEPS)
    two = ranks(2)
    all_do(two, "open", 1, 2)
    first, second = all_do(two, "train", NUM_STEPS, 2, False)
    expect_the_same(alone, first, second)
    all_do(two, "close")
    all_do(two, "open", 2, 2)
    sharded_first, sharded_second = all_do(two, "train", NUM_STEPS, 2, True)
    assert sharded_first.fingerprint == sharded_second.fingerprint == first.fingerprint
    # Each keeps some of the moments, and together they keep what one rank keeps alone.
    shares = [sharded_first.num_state_elements, sharded_second.num_state_elements]
    assert sum(shares) == alone.num_state_elements == first.num_state_elements
    assert max(shares) < 0.6 * alone.num_state_elements


@pytest.mark.integration
def test_three_ranks_with_unequal_parts_do_too(ranks: Ranks) -> None:
    alone = train(Team(), NUM_STEPS)
    three = ranks(3)
    all_do(three, "open", 1, 3)
    expect_the_same(alone, *all_do(three, "train", NUM_STEPS, 3, False))


@pytest.mark.integration
def test_ranks_that_differ_by_one_bit_are_found_out(ranks: Ranks) -> None:
    two = ranks(2)
    all_do(two, "open", 1, 2)
    assert all_do(two, "compare", 2, None, False) == ["the same"] * 2
    for nudged in range(2):
        answers = all_do(two, "compare", 2, nudged, False)
        assert all(answer.startswith("RanksDifferError: ranks: the ranks' parameters differ") for answer in answers)
        assert all_do(two, "compare", 2, nudged, True) == ["the same"] * 2


def expect_the_same(alone: Trained, *trained: Trained) -> None:
    assert len({each.fingerprint for each in trained}) == 1
    for each in trained:
        assert each.num_tokens == alone.num_tokens
        assert each.losses == pytest.approx(alone.losses, rel=1e-4)
    # Adam divides by a root of squares: where a gradient is nearly 0, rounding alone turns its step.
    apart = torch.tensor(trained[0].parameters) - torch.tensor(alone.parameters)
    moved = torch.tensor(alone.parameters).norm()
    assert apart.norm() < 1e-4 * moved


def test_ranks_share_out_the_rows_of_the_built_in_workload() -> None:
    corpus = torch.randint(0, 256, (20_000,), dtype=torch.uint8)
    workload = CorpusText(corpus, batch_size=4)
    shard = Shard(slot=1, num_shards=3, seed=7)
    whole = workload.rank_batches(shard, Part(), position=5)
    parts = [workload.rank_batches(shard, Part(rank=rank, num_ranks=2), position=5) for rank in range(2)]
    for _ in range(50):
        first, second = (next(part) for part in parts)
        assert torch.equal(torch.stack([first, second], dim=1).flatten(0, 1), next(whole))


def test_other_workloads_get_finer_shards_that_are_disjoint() -> None:
    seen: list[Shard] = []

    class Recording(CorpusText):
        def batches(self, shard: Shard, *, position: int) -> object:  # type: ignore[override]
            seen.append(shard)
            return iter(range(shard.slot, 120, shard.num_shards))

        rank_batches = Workload.rank_batches

    workload = Recording(torch.zeros(1, dtype=torch.uint8), batch_size=1)
    parts = [
        set(workload.rank_batches(Shard(slot=slot, num_shards=3, seed=0), Part(rank=rank, num_ranks=2), position=0))
        for slot, rank in itertools.product(range(3), range(2))
    ]
    assert set.union(*parts) == set(range(120))
    assert sum(map(len, parts)) == 120
    assert all(shard.slot < shard.num_shards for shard in seen)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("position", [0, 4])
def test_batches_in_turn_are_the_slots_own_in_their_order_whatever_the_number_of_ranks(
    num_ranks: int, position: int
) -> None:
    corpus = torch.randint(0, 256, (6000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    workload, shard = CorpusText(corpus, batch_size=2), Shard(slot=1, num_shards=3, seed=4)
    parts = [
        batches_in_turn(workload, shard, Part(rank=rank, num_ranks=num_ranks), position=position)
        for rank in range(num_ranks)
    ]
    own = workload.batches(shard, position=position * num_ranks)
    for _ in range(6):
        for part in parts:
            assert torch.equal(next(part), next(own))


def test_buckets_are_full_and_none_is_empty() -> None:
    assert list(bucket_bounds([5, 5, 5], 100)) == [0, 3]
    assert list(bucket_bounds([100, 5, 5], 100)) == [0, 1, 3]
    assert list(bucket_bounds([60, 60, 60, 1], 100)) == [0, 2, 4]
    assert list(bucket_bounds([100], 100)) == [0, 1]


def test_parts_are_shared_out_evenly() -> None:
    assert share_out([8, 1, 7, 2], 2) == [0, 0, 1, 1]
    loads = [0, 0, 0]
    sizes = [int(size) for size in torch.randint(1, 1000, (50,))]
    for size, owner in zip(sizes, share_out(sizes, 3), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= max(sizes)
    assert share_out([4], 3) == [0]


def test_optimizers_leave_out_what_has_no_gradient() -> None:
    """What `shard_optimizer` builds on, for the optimizer that is the default."""
    module = nn.Linear(3, 3)
    optimizer = adamw(module, InnerConfig())
    module.weight.grad = torch.ones_like(module.weight)
    before = module.bias.clone()
    optimizer.step()
    assert torch.equal(module.bias, before)
    assert module.bias not in optimizer.state
