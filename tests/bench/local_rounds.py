"""Runs of a small GPT whose islands are in one process: the library's islands, codecs and outer optimizer, no wire.

A run is plain data parallel (one optimizer, the batches of all islands in each step) or DiLoCo; both take the same
batches in the same order, so that equal steps are equal tokens. AdamW with a linear warm-up and a cosine to a tenth.
The first steps of a DiLoCo run may be data parallel, as in the paper (24,000 of 88,000); islands then go on from there,
each with a copy of the optimizer's state.
"""

from __future__ import annotations

import copy
import math
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
    """That one island sends; 0 for data parallel."""


def run(setting: Setting) -> Result:
    torch.set_num_threads(1)
    corpus = load_corpus([])
    streams = [_stream(setting, corpus, slot) for slot in range(NUM_ISLANDS)]
    if setting.sync_every:
        module, losses, sent = _diloco(setting, streams)
    else:
        trainer = Trainer(setting)
        losses = _data_parallel(trainer, streams, setting.num_steps)
        module, sent = trainer.module, 0
    tail = losses[-max(len(losses) // 10, 1) :]
    return Result(
        setting=setting,
        loss=_evaluate(module, _stream(setting, corpus, HELD_OUT)),
        train_loss=sum(tail) / len(tail),
        bytes_per_round=sent,
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


def _diloco(setting: Setting, streams: list[TokenStream]) -> tuple[nn.Module, list[float], int]:
    first, trainers = Trainer(setting), [Trainer(setting) for _ in streams]
    losses = _data_parallel(first, streams, setting.warm_steps)
    for trainer in trainers:
        trainer.follow(first)
    islands = [Island(trainer.module, CODECS[setting.codec]) for trainer in trainers]
    start = islands[0].global_flat
    outer = OuterOptimizer(start.clone(), torch.zeros_like(start), lr=setting.outer_lr, mu=setting.outer_momentum)
    version, sent, result_due = 0, 0, -1
    for step in range(1, setting.num_steps - setting.warm_steps + 1):
        is_last = step == setting.num_steps - setting.warm_steps
        losses.append(sum(t.step(next(s)) for t, s in zip(trainers, streams, strict=True)) / len(streams))
        for island in islands:
            island.count_step(setting.batch_size * setting.size.context)
        if is_last and version and islands[0].version < version:
            _adopt(islands, outer, version)
        if step % setting.sync_every == 0 or is_last:
            sent = _close_round(outer, islands)
            version += 1
            # The last round is waited for: what is measured are the global parameters.
            result_due = step if is_last else step + setting.overlap_steps
        if step == result_due:
            _adopt(islands, outer, version)
    return islands[0].module, losses, sent


def _adopt(islands: list[Island], outer: OuterOptimizer, version: int) -> None:
    for island in islands:
        island.adopt(outer.parameters, version)


def _close_round(outer: OuterOptimizer, islands: list[Island]) -> int:
    """Everybody contributes, and the outer step is taken; the bytes of one contribution."""
    for island in islands:
        island.accepted = island.contribution()
    pushed = {slot: island.accepted for slot, island in enumerate(islands) if island.accepted is not None}
    outer.propose({slot: _placed(outer, islands[slot], contribution) for slot, contribution in pushed.items()})
    outer.commit()
    return pushed[0].payload.numel()


def _placed(outer: OuterOptimizer, island: Island, pushed: Pushed) -> Contribution:
    """As the synchronizer places what it has decoded."""
    vector = island.codec.decode(pushed.payload, outer.parameters.numel())
    local = vector if island.codec.carries_parameters else outer.parameters - vector
    return Contribution(local=local, tokens=pushed.tokens)


@torch.no_grad()
def _evaluate(module: nn.Module, stream: TokenStream) -> float:
    return sum(next_byte_loss(module, next(stream)).item() for _ in range(NUM_EVALUATED)) / NUM_EVALUATED
