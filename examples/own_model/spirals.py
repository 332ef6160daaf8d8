"""A model of one's own: a small network that tells two spirals apart, on points made from the seed.

``wadiloco island --workload spirals:make --workload-options width=64``
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from diloco.data import ShardOrder
from diloco.workload import Shard, Workload

TURNS = 1.5
NOISE_STD = 0.02

Batch = tuple[Tensor, Tensor]
"""Points (batch, 2), fp32; and the spiral that each is on (batch,), 0 or 1, fp32."""


def make_points(num_samples: int, seed: int) -> Batch:
    """Points on two spirals from the origin outwards, within about 1 of it."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (num_samples,), generator=generator).float()
    radius = torch.rand(num_samples, generator=generator)
    angle = math.pi * (2 * TURNS * radius + labels)
    on_spiral = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    noise = NOISE_STD * torch.randn(num_samples, 2, generator=generator)
    return on_spiral + noise, labels


class Spirals(Workload[Batch]):
    def __init__(self, *, width: int, batch_size: int, num_samples: int) -> None:
        self._width = width
        self._batch_size = batch_size
        self._num_samples = num_samples

    def build_model(self, *, seed: int) -> nn.Module:
        # torch's generator is seeded before: the layers' own initial values are the same on every island.
        width = self._width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def batches(self, shard: Shard, *, position: int) -> Iterator[Batch]:
        points, labels = make_points(self._num_samples, shard.seed)
        order = ShardOrder(
            self._num_samples,
            slot=shard.slot,
            num_shards=shard.num_shards,
            seed=shard.seed,
            batch_size=self._batch_size,
            position=position,
        )
        return ((points[chosen], labels[chosen]) for chosen in order)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        points, labels = batch
        return functional.binary_cross_entropy_with_logits(model(points).squeeze(1), labels)

    def count_tokens(self, batch: Batch) -> int:
        return len(batch[1])


def make(width: str = "32", batch_size: str = "64", num_samples: str = "8192") -> Spirals:
    """The factory: its arguments are the workload's options, which come as strings."""
    return Spirals(width=int(width), batch_size=int(batch_size), num_samples=int(num_samples))
