"""What a researcher brings to a run: a model, its data, its loss. ``wadiloco island --workload MODULE:FACTORY``.

The factory returns a `Workload`; the options of ``--workload-options`` are its keyword arguments, as strings. All
islands of a run are started with the same workload, options, seed and data_shards.

Batch i of a slot is a function of the shard and of i, whatever happened before: a worker that takes over at position p
goes on with the batches p, p + 1, …, as if nobody had been restarted. `diloco.data.ShardOrder` gives such an order of
the samples of a data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.inner import InnerConfig, adamw

B = TypeVar("B")
"""A batch: whatever the loss takes, but not None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of the data that one slot trains on, and what its order is drawn from."""

    slot: int
    """0 ≤ slot < num_shards."""
    num_shards: int
    """The same on all islands: disjoint shards are sample k → slot k mod num_shards, for example."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a slot's data that one rank of its island trains on."""

    rank: int = 0
    """0 ≤ rank < num_ranks."""
    num_ranks: int = 1


class Workload(ABC, Generic[B]):
    """A model and what trains it. What it raises until its first inner step is done ends the island with the reason."""

    @abstractmethod
    def build_model(self, *, seed: int) -> nn.Module:
        """The model as ``seed`` stands for it: on every island the same names, shapes and values.

        torch's global generator is seeded with it before. Parameters with requires_grad travel and must be float32;
        frozen ones and buffers stay on the island.
        """

    @abstractmethod
    def batches(self, shard: Shard, *, position: int) -> Iterator[B]:
        """The batches ``position``, position + 1, … of the shard, without an end; accumulation_steps of
        them (1 unless the island is told otherwise) are taken per inner step."""

    def rank_batches(self, shard: Shard, part: Part, *, position: int) -> Iterator[B]:
        """The batches of one rank, which are disjoint from the other ranks'; with one rank, those of the shard.

        By default each rank has its own part of the shard, k mod (num_shards · num_ranks), and batches as large as
        those of an island with one rank. An island of N ranks then takes N times as many samples per step, and in
        another order than one of another N; `batches_in_turn` and `rows_of` keep to one order.
        """
        if part.num_ranks == 1:
            return self.batches(shard, position=position)
        slot = shard.slot + shard.num_shards * part.rank
        finer = Shard(slot=slot, num_shards=shard.num_shards * part.num_ranks, seed=shard.seed)
        return self.batches(finer, position=position)

    @abstractmethod
    def loss(self, model: nn.Module, batch: B) -> Tensor:
        """What the step minimizes: a tensor of shape () with a gradient, the mean over the batch's `count_tokens`."""

    @abstractmethod
    def count_tokens(self, batch: B) -> int:
        """Tokens (or samples) in the batch, at least 1: what a contribution weighs is the sum of them."""

    def build_optimizer(self, model: nn.Module, config: InnerConfig) -> Optimizer:
        """The inner optimizer, over parameters with requires_grad only.

        The learning rate of each of its groups is the peak that the warm-up rises to. Clipping comes before its step,
        and a step whose loss or gradient is not finite is left out. Its state is local, and begins anew with a worker.
        """
        return adamw(model, config)

    def checkpointed_layers(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers that ``--activation-checkpointing`` is for, none inside another; by default none: it is refused.

        The blocks of a transformer, for example. A layer's forward must do the same when it is called again.
        """
        return ()


def batches_in_turn(workload: Workload[B], shard: Shard, part: Part, *, position: int) -> Iterator[B]:
    """What `Workload.rank_batches` may return so that the slot's order of batches is the same for any number of ranks:
    rank r of N takes the batches r, N + r, 2 N + r, … of the shard.

    A step of N ranks is then that of one rank with N times the accumulation_steps. Each rank makes all batches and
    leaves out those of the others, which is for batches that cost little against a step.
    """
    first = position * part.num_ranks + part.rank
    return islice(workload.batches(shard, position=first), 0, None, part.num_ranks)


def rows_of(batches: Iterator[Tensor], part: Part) -> Iterator[Tensor]:
    """One rank's rows of batches whose first dimension is samples: row k is rank k mod num_ranks's."""
    if part.num_ranks == 1:
        return batches
    return (batch[part.rank :: part.num_ranks] for batch in batches)
