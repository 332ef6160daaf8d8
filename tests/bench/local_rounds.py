"""Runs of a small GPT whose islands are in one process: the library's islands, codecs and outer optimizer, no wire.

A run is plain data parallel (one optimizer, the batches of all islands in each step) or DiLoCo; both take the same
batches in the same order, so that equal steps are equal tokens. AdamW with a linear warm-up and a cosine to a tenth.
With fragments (Streaming DiLoCo) each syncs every H steps, one after another. The first steps may be data parallel, as
in the paper (24,000 of 88,000); islands then go on from there, each with a copy of the optimizer's state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco.codec import CODECS
from diloco.data import TokenStream, load_corpus
from diloco.island import Contribution as Pushed
from diloco.island import Island
from diloco.model import ModelSize, build_model, next_byte_loss
from diloco.outer import Contribution, OuterOptimizer
from diloco.schema import CodecName
from diloco.streaming import StreamingIsland

NUM_ISLANDS = 2
WIDTH = 128
"""0.4 million parameters."""
HELD_OUT = NUM_ISLANDS
"""Slot of the shard that nobody trains on."""
NUM_EVALUATED = 64
"""Batches of it that the loss is measured on."""
WARMUP_FRAC, FLOOR = 0.05, 0.1
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run."""

    method: str
    seed: int
    num_steps: int
    inner_lr: float
    sync_every: int = 0
    """H; 0 is plain data parallel."""
    warm_steps: int = 0
    """That are data parallel, before the islands part."""
    codec: CodecName = "fp32"
    overlap_steps: int = 0
    num_fragments: int = 1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    batch_size: int = 8
    width: int = WIDTH

    @property
    def size(self) -> ModelSize:
        return ModelSize(num_layers=2, num_heads=self.width // 32, width=self.width, context=self.width // 2)


@dataclass(frozen=True, kw_only=True)
class Result:
    setting: Setting
    loss: float
    """On the held-out shard, of the global parameters, nats per byte."""
    train_loss: float
    """Mean over the last tenth of the steps, of the islands."""
    bytes_per_round: int
    """That one island sends in H steps; 0 for data parallel."""
    bytes_at_once: int
    """The most that it sends in one sync."""


def run(setting: Setting) -> Result:
    torch.set_num_threads(1)
    corpus = load_corpus([])
    streams = [_stream(setting, corpus, slot) for slot in range(NUM_ISLANDS)]
    if setting.sync_every:
        module, losses, sent = _diloco(setting, streams)
    else:
        trainer = Trainer(setting)
        losses = _data_parallel(trainer, streams, setting.num_steps)
        module, sent = trainer.module, [0]
    tail = losses[-max(len(losses) // 10, 1) :]
    return Result(
        setting=setting,
        loss=_evaluate(module, _stream(setting, corpus, HELD_OUT)),
        train_loss=sum(tail) / len(tail),
        bytes_per_round=sum(sent),
        bytes_at_once=max(sent),
    )


class Trainer:
    """A module with its inner optimizer and schedule."""

    def __init__(self, setting: Setting) -> None:
        self.module: nn.Module = build_model(setting.size, seed=setting.seed)
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=setting.inner_lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: lr_factor(step, setting.num_steps)
        )

    def follow(self, other: Trainer) -> None:
        """Go on from where the other is."""
        self.module.load_state_dict(other.module.state_dict())
        self._optimizer.load_state_dict(copy.deepcopy(other._optimizer.state_dict()))
        self._schedule.load_state_dict(other._schedule.state_dict())

    def step(self, batch: Tensor) -> float:
        self._optimizer.zero_grad()
        loss = next_byte_loss(self.module, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._schedule.step()
        return loss.item()


def lr_factor(step: int, num_steps: int) -> float:
    """Of the peak: up over the first twentieth, then half a cosine down to `FLOOR`."""
    warmup = max(int(WARMUP_FRAC * num_steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(num_steps - warmup, 1)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _stream(setting: Setting, corpus: Tensor, slot: int) -> TokenStream:
    return TokenStream(
        corpus,
        slot=slot,
        num_shards=NUM_ISLANDS + 1,
        seed=setting.seed,
        batch_size=setting.batch_size,
        length=setting.size.context,
    )


def _data_parallel(trainer: Trainer, streams: list[TokenStream], num_steps: int) -> list[float]:
    return [trainer.step(torch.cat([next(stream) for stream in streams])) for _ in range(num_steps)]


def _diloco(setting: Setting, streams: list[TokenStream]) -> tuple[nn.Module, list[float], list[int]]:
    first, trainers = Trainer(setting), [Trainer(setting) for _ in streams]
    losses = _data_parallel(first, streams, setting.warm_steps)
    for trainer in trainers:
        trainer.follow(first)
    codec, number = CODECS[setting.codec], setting.num_fragments
    islands = [StreamingIsland(trainer.module, codec, num_fragments=number) for trainer in trainers]
    fragments = [FragmentRounds(setting, parts) for parts in zip(*(i.fragments for i in islands), strict=True)]
    num_closed, num_steps = 0, setting.num_steps - setting.warm_steps
    for step in range(1, num_steps + 1):
        losses.append(sum(t.step(next(s)) for t, s in zip(trainers, streams, strict=True)) / len(streams))
        for island in islands:
            island.count_step(setting.batch_size * setting.size.context)
        if step == num_steps:
            # The last rounds are waited for: what is measured are the global parameters.
            for fragment in fragments:
                fragment.adopt()
                fragment.close()
                fragment.adopt()
        elif step * number // setting.sync_every > num_closed:
            fragment = fragments[num_closed % number]
            num_closed += 1
            fragment.adopt()
            fragment.close()
            fragment.due_step = step + setting.overlap_steps
        for fragment in fragments:
            if step == fragment.due_step:
                fragment.adopt()
    return islands[0].module, losses, [fragment.sent for fragment in fragments]


class FragmentRounds:
    """The rounds of one fragment, or of the whole model where that is one."""

    def __init__(self, setting: Setting, islands: Sequence[Island]) -> None:
        self._islands = islands
        start = islands[0].global_flat
        self._outer = OuterOptimizer(
            start.clone(), torch.zeros_like(start), lr=setting.outer_lr, mu=setting.outer_momentum
        )
        self._version = 0
        self.due_step = -1
        """When the islands adopt what the last round made."""
        self.sent = 0
        """Bytes of one contribution."""

    def close(self) -> None:
        """Everybody contributes, and the outer step is taken."""
        for island in self._islands:
            island.accepted = island.contribution()
        given = [(island, island.accepted) for island in self._islands if island.accepted is not None]
        self._outer.propose({slot: _placed(self._outer, *each) for slot, each in enumerate(given)})
        self._outer.commit()
        self._version += 1
        self.sent = given[0][1].payload.numel()

    def adopt(self) -> None:
        """Go on from what the last round made, unless that is done."""
        for island in self._islands:
            if island.version < self._version:
                island.adopt(self._outer.parameters, self._version)


def _placed(outer: OuterOptimizer, island: Island, pushed: Pushed) -> Contribution:
    """As the synchronizer places what it has decoded."""
    vector = island.codec.decode(pushed.payload, outer.parameters.numel())
    local = vector if island.codec.carries_parameters else outer.parameters - vector
    return Contribution(local=local, tokens=pushed.tokens)


@torch.no_grad()
def _evaluate(module: nn.Module, stream: TokenStream) -> float:
    return sum(next_byte_loss(module, next(stream)).item() for _ in range(NUM_EVALUATED)) / NUM_EVALUATED
