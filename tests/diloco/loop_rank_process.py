"""Ranks of a training loop with an ``Island`` in it, as real processes that do what they are told through a pipe."""

from __future__ import annotations

import io
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from diloco import Island
from diloco.data import TokenStream
from diloco.fragment import flatten_module
from diloco.model import build_model, next_byte_loss
from tests.diloco.loops import BATCH_SIZE, TINY, corpus

NUM_RANKS = 2
DDP_TIMEOUT = timedelta(seconds=60)


class Halves:
    """The part of each batch that a rank trains on; all parts for a process alone."""

    def __init__(self, slot: int, parts: range) -> None:
        self.parts = parts
        self.stream = TokenStream(corpus(), slot=slot, num_shards=4, seed=0, batch_size=BATCH_SIZE, length=TINY.context)

    def take(self) -> list[Tensor]:
        batch = next(self.stream)
        return [batch[part::NUM_RANKS] for part in self.parts]

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.stream.load_state_dict(state_dict)


class RankLoop:
    """A model under DDP, or plain with ``wrapped=False``, and the loop over its part of the batches."""

    def __init__(self, rank: int, rendezvous: str, _: float = 0.0) -> None:
        distributed.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS, timeout=DDP_TIMEOUT
        )
        self.rank = rank
        self._opened: Island | None = None

    @property
    def island(self) -> Island:
        assert self._opened is not None
        return self._opened

    def open(self, wrapped: bool = True, seed: int = 0, **options: Any) -> str:
        if self._opened is not None:
            # As a process that dies: nobody finishes anything.
            self._opened.__exit__(RuntimeError, None, None)
        self.model: nn.Module = build_model(TINY, seed=seed)
        module = DistributedDataParallel(self.model) if wrapped else self.model
        self.module: nn.Module = module
        # Without DDP nobody averages gradients: all ranks take the same steps on the same data.
        parts = range(self.rank, self.rank + 1) if wrapped else range(NUM_RANKS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        slot = options.get("slot") or 0
        self.data = Halves(slot, parts)
        chosen = {"timeout_s": 60.0, "rank_timeout_s": 30.0, "process_group": "world", **options}
        self._opened = Island(module, self.optimizer, self.data, **chosen)
        return "open"

    def train(self, num_steps: int) -> list[tuple[int, str, int] | None]:
        """Take steps until so many have been taken; what `Island.step` said at each."""
        said: list[tuple[int, str, int] | None] = []
        while self.island.num_steps < num_steps:
            report = self.island.step(tokens=take_step(self.module, self.optimizer, self.data))
            said.append(None if report is None else (report.round, str(report.outcome), report.tokens))
        return said

    def sync(self) -> str:
        return str(self.island.sync().outcome)

    def bits(self) -> Tensor:
        return flatten_module(self.model).view(torch.int32)

    def nudge(self) -> str:
        """Change the last bit of a parameter."""
        with torch.no_grad():
            next(self.model.parameters()).view(torch.int32).view(-1)[7] ^= 1
        return "nudged"

    def counts(self) -> dict[str, Any]:
        island = self.island
        names = ("slot", "num_steps", "num_tokens", "num_fragments", "version", "steps_since_sync", "residual_norm")
        return {name: getattr(island, name) for name in names}

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save(self.island.state_dict(), file)
        return file.getvalue()

    def continued(self, saved: bytes) -> bool:
        return self.island.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))

    def close(self) -> str:
        self.island.close()
        return "closed"


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer, data: Halves) -> int:
    """One inner step on the mean loss of the parts; returns its tokens."""
    optimizer.zero_grad()
    parts = data.take()
    for part in parts:
        loss = next_byte_loss(module, part) / len(parts)
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return sum(part[:, 1:].numel() for part in parts)


def obey(orders: Connection, rank: int, rendezvous: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    loop = RankLoop(rank, rendezvous, timeout_s)
    while True:
        try:
            order, arguments = orders.recv()
        except EOFError:
            return
        options = arguments[0] if order == "open" else {}
        try:
            answer = loop.open(**options) if order == "open" else getattr(loop, order)(*arguments)
        except Exception as exc:  # noqa: BLE001 (told to the test)
            traceback.print_exc()
            answer = f"{type(exc).__name__}: {exc}"
        orders.send(answer)
