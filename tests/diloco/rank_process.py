"""Ranks as real processes that do what they are told through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import httpx
import torch

from diloco.byte_text import ByteText
from diloco.data import TokenStream
from diloco.device import CPU, choose_device
from diloco.fragment import flatten_module
from diloco.group import Group, open_group
from diloco.http_store import HttpStore
from diloco.inner import InnerConfig, InnerLoop, adamw
from diloco.model import ModelSize, build_model
from diloco.team import RankTeam, Team, fingerprint
from diloco.workload import Part, Shard

ANSWER_S = 60.0
TIMEOUT_S = 10.0
TINY = ModelSize(num_layers=2, num_heads=2, width=32, context=16)


class RankProcess:
    """One rank; `tell` and `answer` are apart, since collectives need all ranks."""

    def __init__(
        self,
        rank: int,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        serve: Callable[[Connection, int, str, float], None] | None = None,
    ) -> None:
        """``serve`` obeys orders in the process, as `obey` does."""
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self._here, there = context.Pipe()
        self.process = context.Process(target=serve or obey, args=(there, rank, url, timeout_s), daemon=True)
        self.process.start()
        there.close()

    def tell(self, order: str, *arguments: Any) -> None:
        self._here.send((order, arguments))

    def answer(self) -> Any:
        assert self._here.poll(ANSWER_S), f"rank {self.rank} says nothing"
        return self._here.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        if self.process.is_alive():
            self.kill()
        self.process.close()
        self._here.close()


Ranks = Callable[[int], list[RankProcess]]


def all_do(ranks: list[RankProcess], order: str, *arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.tell(order, *arguments)
    return [rank.answer() for rank in ranks]


def obey(orders: Connection, rank: int, url: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    worker = _Rank(rank, url, timeout_s)
    while True:
        try:
            order, arguments = orders.recv()
        except EOFError:
            return
        try:
            answer = getattr(worker, order)(*arguments)
        except Exception as exc:  # noqa: BLE001 (told to the test)
            traceback.print_exc()
            answer = f"{type(exc).__name__}: {exc}"
        orders.send(answer)


@dataclass(frozen=True)
class Trained:
    parameters: list[float]
    fingerprint: int
    losses: list[float]
    num_tokens: int
    num_state_elements: int


def train(team: Team, num_steps: int, device: torch.device = CPU) -> Trained:
    """As a worker does, without one."""
    corpus = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    workload = CorpusText(corpus, batch_size=4)
    module = workload.build_model(seed=0).to(device)
    config = InnerConfig(warmup_steps=5, lr=3e-3)
    optimizer = workload.build_optimizer(module, config)
    team.prepare(module, optimizer)
    inner = InnerLoop(module, config, optimizer=optimizer, average=team.average)
    batches = workload.rank_batches(
        Shard(slot=0, num_shards=2, seed=0), Part(rank=team.rank, num_ranks=team.num_ranks), position=0
    )
    losses, num_tokens = [], 0
    for _ in range(num_steps):
        batch = next(batches)
        team.weigh(workload.count_tokens(batch))
        assert inner.take_step(batch)
        num_tokens += team.num_tokens
        losses.append(inner.loss or 0.0)
    flat = flatten_module(module)
    state = sum(value.numel() for each in optimizer.state.values() for value in each.values())
    return Trained(flat.tolist(), fingerprint(flat), losses, num_tokens, state)


class CorpusText(ByteText):
    """The built-in workload on bytes in memory."""

    def __init__(self, corpus: torch.Tensor, *, batch_size: int) -> None:
        super().__init__(TINY, data=(), batch_size=batch_size)
        self._corpus = corpus

    def batches(self, shard: Shard, *, position: int) -> TokenStream:
        return TokenStream(
            self._corpus,
            slot=shard.slot,
            num_shards=shard.num_shards,
            seed=shard.seed,
            batch_size=self._batch_size,
            length=TINY.context,
            position=position,
        )


class _Rank:
    def __init__(self, rank: int, url: str, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._http = httpx.Client(base_url=url, trust_env=False)
        self._group: Group | None = None
        self._device = CPU

    def open(self, epoch: int, num_ranks: int, device: str = "cpu") -> str:
        self._device = choose_device(device, rank=self._rank, num_ranks=num_ranks)
        store = HttpStore(self._http, group="run/slot-0", epoch=epoch, timeout_s=self._timeout_s)
        self._group = open_group(
            store, rank=self._rank, num_ranks=num_ranks, timeout_s=self._timeout_s, device=self._device
        )
        return "open"

    def sum(self, num_elements: int) -> float:
        assert self._group is not None
        tensor = torch.full((num_elements,), float(self._rank + 1), device=self._device)
        self._group.start_sum(tensor).wait()
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    def use_and_close(self, epoch: int, num_ranks: int) -> float:
        self.open(epoch, num_ranks)
        total = self.sum(100_000)
        assert self.close() == "closed"
        return total

    def close(self) -> str:
        assert self._group is not None
        group, self._group = self._group, None
        return "closed" if group.close() else "hangs"

    def train(self, num_steps: int, num_ranks: int, sharded: bool) -> Trained:
        """Inner steps on this rank's rows of the batches, in the group that is open."""
        assert self._group is not None
        group = self._group
        team = RankTeam(lambda: group, rank=self._rank, num_ranks=num_ranks, is_gated=False, shards_optimizer=sharded)
        team.meet()
        return train(team, num_steps, self._device)

    def compare(self, num_ranks: int, nudged_rank: int | None, takes_over: bool) -> str:
        """See whether all ranks hold the same, where one may be off by the last bit of one element."""
        assert self._group is not None
        group = self._group
        team = RankTeam(lambda: group, rank=self._rank, num_ranks=num_ranks, is_gated=False)
        team.meet()
        module = build_model(TINY, seed=0)
        team.prepare(module, adamw(module, InnerConfig()))
        if self._rank == nudged_rank:
            with torch.no_grad():
                next(module.parameters()).view(torch.int32).view(-1)[7] ^= 1
        if takes_over:
            team.take_over(module)
        team.verify(module)
        return "the same"

    def footprint(self) -> dict[str, int]:
        """Threads, descriptors, and resident memory in MiB."""
        with open("/proc/self/statm") as file:  # noqa: PTH123
            pages = int(file.read().split()[1])
        return {
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        }
