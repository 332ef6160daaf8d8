"""DiLoCo with one island and H = 1, outer lr 1 and no momentum is plain training, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.data import TokenStream
from diloco.fragment import flatten_module
from diloco.inner import InnerConfig, InnerLoop
from diloco.island import Island
from diloco.model import ModelSize, build_model
from diloco.outer import Contribution, OuterOptimizer

TINY = ModelSize(num_layers=2, num_heads=2, width=32, context=16)
NUM_STEPS = 40


def make_stream() -> TokenStream:
    corpus = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return TokenStream(corpus, slot=0, num_shards=1, seed=0, batch_size=4, length=TINY.context)


def train_plainly() -> Tensor:
    stream, module = make_stream(), build_model(TINY, seed=0)
    inner = InnerLoop(module, InnerConfig(warmup_steps=5, lr=3e-3))
    for _ in range(NUM_STEPS):
        inner.take_step(stream.next_batch())
    return flatten_module(module)


def train_with_rounds(*, lr: float, mu: float) -> Tensor:
    stream, module = make_stream(), build_model(TINY, seed=0)
    inner = InnerLoop(module, InnerConfig(warmup_steps=5, lr=3e-3))
    island = Island(module)
    outer = OuterOptimizer(island.global_flat.clone(), torch.zeros_like(island.global_flat), lr=lr, mu=mu)
    for round_number in range(NUM_STEPS):
        inner.take_step(stream.next_batch())
        island.count_step(64)
        island.accepted = island.contribution()
        outer.propose({0: Contribution(local=island.accepted.local, tokens=island.accepted.tokens)})
        outer.commit()
        island.adopt(outer.parameters, round_number + 1)
    return flatten_module(module)


def bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int32)


def test_one_island_with_outer_lr_one_equals_plain_training_bit_for_bit() -> None:
    assert torch.equal(bits(train_with_rounds(lr=1.0, mu=0.0)), bits(train_plainly()))


def test_another_outer_optimizer_gives_other_parameters() -> None:
    assert not torch.equal(train_with_rounds(lr=0.7, mu=0.9), train_plainly())


def test_weights_that_pass_through_zero_survive_the_round_exactly() -> None:
    # Here fp32 cannot hold g - l: 1 - 1e-12 rounds to 1, and 1 - 1 is not 1e-12.
    start = torch.tensor([1.0, -3e-2, 1e-9, 2.0])
    end = torch.tensor([1e-12, 1.7e-11, -0.25, 2.0000002])
    outer = OuterOptimizer(start.clone(), torch.zeros(4), lr=1.0, mu=0.0)
    outer.propose({0: Contribution(local=end, tokens=1)})
    outer.commit()
    assert torch.equal(bits(outer.parameters), bits(end))
