"""An island as a process that trains and syncs when it is told through a pipe, the same every time."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import httpx
import torch
from torch import Tensor

from diloco.codec import CODECS
from diloco.data import TokenStream
from diloco.fragment import flatten_module
from diloco.inner import InnerConfig, InnerLoop
from diloco.model import ModelSize, build_model
from diloco.protocol import SyncCommand
from diloco.schema import CodecName, SyncReport
from diloco.shards import Shards
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.transport import SynchronizerClient

TINY = ModelSize(num_layers=2, num_heads=2, width=32, context=16)
NUM_SLOTS = 2
ANSWER_S = 90.0


class IslandProcess:
    """One island; `begin` and `report` are apart, since a round needs all."""

    def __init__(self, slot: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self.process = context.Process(target=_obey, args=(there, slot), daemon=True)
        self.process.start()
        there.close()

    def join(self, urls: list[str], *, num_fragments: int, codec: str = "fp32") -> None:
        """Leave the run that it is in, and join the one at these synchronizers with a new model."""
        self._here.send(("join", urls, num_fragments, codec))
        assert self._answer() == "joined"

    def begin(self, number: int | None, *, num_steps: int = 3, wait_s: float = 60.0) -> None:
        """Train, and come to that round."""
        self._here.send(("sync", number, num_steps, wait_s))

    def report(self) -> SyncReport:
        answer = self._answer()
        assert isinstance(answer, SyncReport), answer
        return answer

    def parameters(self) -> tuple[Tensor, Tensor]:
        """The bits of the global and the local ones."""
        self._here.send(("parameters",))
        found = self._answer()
        return torch.tensor(found[0], dtype=torch.int32), torch.tensor(found[1], dtype=torch.int32)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.process.close()
        self._here.close()

    def _answer(self) -> Any:
        assert self._here.poll(ANSWER_S), "the island says nothing"
        return self._here.recv()


class _Island:
    def __init__(self, slot: int, urls: list[str], num_fragments: int, codec: CodecName) -> None:
        corpus = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        self._stream = TokenStream(corpus, slot=slot, num_shards=NUM_SLOTS, seed=0, batch_size=4, length=TINY.context)
        self._island = StreamingIsland(build_model(TINY, seed=slot), CODECS[codec])
        self._inner = InnerLoop(self._island.module, InnerConfig(warmup_steps=5, lr=3e-3))
        http = [httpx.Client(base_url=url, timeout=10, trust_env=False) for url in urls]
        self._exchange = StreamingExchange(self._island, Shards([SynchronizerClient(one) for one in http]), slot=slot)
        self._exchange.join(deadline_s=time.time() + ANSWER_S, num_fragments=num_fragments)

    def sync(self, number: int | None, num_steps: int, wait_s: float) -> SyncReport | None:
        for _ in range(num_steps):
            batch = self._stream.next_batch()
            self._inner.take_step(batch)
            self._island.count_step(batch[:, 1:].numel())
        return self._exchange.run(SyncCommand(round=number, epoch=0, deadline_s=time.time() + wait_s))

    def parameters(self) -> list[list[int]]:
        flats = (self._island.global_flat, flatten_module(self._island.module))
        return [flat.view(torch.int32).tolist() for flat in flats]


def _obey(orders: Connection, slot: int) -> None:
    torch.set_num_threads(1)
    island: _Island | None = None
    while True:
        try:
            order, *arguments = orders.recv()
        except EOFError:
            return
        if order == "join":
            island = _Island(slot, *arguments)
            orders.send("joined")
        else:
            orders.send(getattr(island, order)(*arguments))
