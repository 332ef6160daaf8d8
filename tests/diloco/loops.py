"""Training loops on tiny models, as a user of ``diloco.Island`` writes them, several of them in threads."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco import Island
from diloco.data import TokenStream
from diloco.fragment import flatten_module
from diloco.model import ModelSize, build_model, next_byte_loss

TINY = ModelSize(num_layers=1, num_heads=2, width=32, context=16)
BATCH_SIZE = 4
TIMEOUT_S = 60.0

R = TypeVar("R")


def corpus() -> Tensor:
    text = "".join(f"{i} squared is {i * i}\n" for i in range(2000))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@dataclass
class Loop:
    """One island's model, optimizer and data, and a plain loop over them."""

    slot: int
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    num_shards: int = 4

    def __post_init__(self) -> None:
        self._make()
        chosen = {
            "synchronizer": self.url,
            "slot": self.slot,
            "sync_every": 5,
            "timeout_s": TIMEOUT_S,
            **self.options,
        }
        self.island = Island(self.model, self.optimizer, self.data, **chosen)

    @classmethod
    def plain(cls, slot: int) -> Loop:
        """One without an island."""
        loop = cls.__new__(cls)
        loop.slot, loop.num_shards = slot, 4
        loop._make()
        return loop

    def _make(self) -> None:
        self.model: nn.Module = build_model(TINY, seed=0)
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.data = TokenStream(
            corpus(),
            slot=self.slot,
            num_shards=self.num_shards,
            seed=0,
            batch_size=BATCH_SIZE,
            length=TINY.context,
        )

    def train(self, num_steps: int) -> Loop:
        """Take steps until so many have been taken in the whole run."""
        while self.island.num_steps < num_steps:
            self.island.step(tokens=self.take_step())
        return self

    def take_step(self) -> int:
        """One inner step; returns its tokens."""
        batch = next(self.data)
        loss = next_byte_loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return batch[:, 1:].numel()

    def saved(self) -> bytes:
        """The state as it is written to a file and read from it by any user."""
        file = io.BytesIO()
        torch.save(self.island.state_dict(), file)
        return file.getvalue()

    def continued(self, saved: bytes) -> bool:
        return self.island.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))

    def bits(self) -> Tensor:
        """Parameters, to the last bit."""
        return flatten_module(self.model).view(torch.int32)


def together(calls: list[Callable[[], R]]) -> list[R]:
    """The results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(3 * TIMEOUT_S) for future in [pool.submit(call) for call in calls]]


def loops(url: str, num_islands: int = 2, **options: Any) -> list[Loop]:
    return [Loop(slot, url, options) for slot in range(num_islands)]


def train_together(members: list[Loop], num_steps: int) -> list[Loop]:
    return together([lambda member=member: member.train(num_steps) for member in members])  # type: ignore[misc]


def close_together(members: list[Loop]) -> None:
    together([member.island.close for member in members])
