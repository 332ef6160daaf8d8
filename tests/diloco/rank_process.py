"""Ranks as real processes that do what they are told through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import httpx
import torch

from diloco.group import Group, open_group
from diloco.http_store import HttpStore

ANSWER_S = 60.0


class RankProcess:
    """One rank; `tell` and `answer` are apart, since collectives need all ranks."""

    def __init__(self, rank: int, url: str, *, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self._here, there = context.Pipe()
        self.process = context.Process(target=obey, args=(there, rank, url, timeout_s), daemon=True)
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


class _Rank:
    def __init__(self, rank: int, url: str, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._http = httpx.Client(base_url=url, trust_env=False)
        self._group: Group | None = None

    def open(self, epoch: int, num_ranks: int) -> str:
        store = HttpStore(self._http, group="run/slot-0", epoch=epoch, timeout_s=self._timeout_s)
        self._group = open_group(store, rank=self._rank, num_ranks=num_ranks, timeout_s=self._timeout_s)
        return "open"

    def sum(self, num_elements: int) -> float:
        assert self._group is not None
        tensor = torch.full((num_elements,), float(self._rank + 1))
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

    def footprint(self) -> dict[str, int]:
        """Threads, descriptors, and resident memory in MiB."""
        with open("/proc/self/statm") as file:  # noqa: PTH123
            pages = int(file.read().split()[1])
        return {
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        }
