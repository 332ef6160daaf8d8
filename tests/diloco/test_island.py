from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diloco.fragment import flatten_module, unflatten_into
from diloco.island import Contribution, Island, NonFiniteError

SIZE = 6


def make_island() -> Island:
    module = nn.Linear(SIZE - 1, 1)
    unflatten_into(torch.arange(SIZE, dtype=torch.float32), module)
    return Island(module)


def local(island: Island) -> Tensor:
    return flatten_module(island.module)


def train(island: Island, change: float, *, tokens: int = 10) -> None:
    """An inner step that adds ``change`` to every parameter."""
    unflatten_into(local(island) + change, island.module)
    island.count_step(tokens)


def accept(island: Island) -> Contribution:
    island.accepted = island.contribution()
    return island.accepted


def test_contribution_is_a_copy_of_the_local_parameters() -> None:
    island = make_island()
    train(island, 2.0)
    contribution = island.contribution()
    train(island, 1.0)
    assert torch.equal(contribution.local, torch.arange(SIZE) + 2.0)
    assert (contribution.round, contribution.inner_steps, contribution.tokens) == (0, 1, 10)
    assert contribution.update_norm == pytest.approx(2.0 * SIZE**0.5)


def test_without_steps_since_the_push_the_new_global_is_adopted_exactly() -> None:
    island = make_island()
    train(island, 0.1)
    accept(island)
    new_global = torch.full((SIZE,), 1e-8)
    assert island.adopt(new_global, 1)
    assert torch.equal(local(island), new_global)
    assert (island.version, island.steps_since_sync, island.tokens_since_sync) == (1, 0, 0)
    assert island.update_norm() == 0.0


def test_steps_since_the_push_are_kept_on_top_of_the_new_global() -> None:
    island = make_island()
    train(island, 2.0)
    accept(island)
    train(island, 0.5, tokens=7)
    assert island.adopt(torch.full((SIZE,), 10.0), 1)
    assert torch.allclose(local(island), torch.full((SIZE,), 10.5))
    assert (island.steps_since_sync, island.tokens_since_sync) == (1, 7)


def test_progress_that_missed_its_round_is_kept_whole_for_the_next() -> None:
    island = make_island()
    train(island, 2.0)
    assert not island.adopt(torch.full((SIZE,), 10.0), 1)
    assert torch.allclose(local(island), torch.full((SIZE,), 12.0))
    assert (island.version, island.steps_since_sync, island.tokens_since_sync) == (1, 1, 10)
    assert island.contribution().round == 1


def test_a_synchronizer_that_went_back_has_not_merged_the_contribution() -> None:
    island = make_island()
    train(island, 1.0)
    accept(island)
    assert not island.adopt(torch.zeros(SIZE), 0)
    assert torch.allclose(local(island), torch.ones(SIZE))
    assert island.accepted is None


def test_later_changes_of_the_received_vector_do_not_reach_the_island() -> None:
    island = make_island()
    incoming = torch.ones(SIZE)
    island.rebase(incoming, 4)
    incoming.fill_(9.0)
    assert torch.equal(local(island), torch.ones(SIZE))
    assert torch.equal(island.global_flat, torch.ones(SIZE))


def test_rebase_drops_local_progress() -> None:
    island = make_island()
    train(island, 3.0)
    island.rebase(torch.ones(SIZE), 2)
    assert torch.equal(local(island), torch.ones(SIZE))
    assert (island.version, island.steps_since_sync) == (2, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_never_leave_the_island(bad: float) -> None:
    island = make_island()
    train(island, bad)
    with pytest.raises(NonFiniteError, match="not finite"):
        island.contribution()


def test_frozen_parameters_and_buffers_stay_with_their_island() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.BatchNorm1d(3), nn.Linear(3, 1))

    islands = [Island(build()) for _ in range(2)]
    for scale, island in enumerate(islands, 1):
        island.module(torch.rand(8, 2) * scale)
        island.count_step(8)
        accept(island)
    before = [{name: value.clone() for name, value in island.module.state_dict().items()} for island in islands]
    new_global = torch.full_like(islands[0].global_flat, 0.5)
    for island in islands:
        island.adopt(new_global, 1)
    travelled = {"1.weight", "1.bias", "2.weight", "2.bias"}
    for island, old in zip(islands, before, strict=True):
        for name, value in island.module.state_dict().items():
            assert torch.equal(value, torch.full_like(value, 0.5) if name in travelled else old[name]), name
    means = [old["1.running_mean"] for old in before]
    assert not torch.equal(*means)
