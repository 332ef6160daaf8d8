"""A gloo group beside the process group of somebody else's training loop, with deadlines of its own.

The loop's group may be NCCL's, where small messages would wait for the GPU, and has the timeout that suits its
gradients. `torch.distributed.new_group` is not used: it names a group after its ranks and how many groups there are, so
that one which is made after another was ended finds the addresses of that one in the store.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, distributed_c10d

from diloco.group import CLOSE_S, Group, lost, on_own_thread
from service.errors import ConfigError

_opened: Counter[tuple[int, ...]] = Counter()
"""How many groups these ranks have opened so far; the same on all of them, as they open them together."""


class LoopGroup(Group):
    """Also takes messages, from rank 0 to all others."""

    def send(self, message: bytes) -> None:
        self.broadcast(torch.tensor([len(message)]))
        self.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        num_bytes = int(self.broadcast(torch.zeros(1, dtype=torch.int64)))
        return self.broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes()


def open_loop_group(ranks: ProcessGroup | Literal["world"], *, timeout_s: float) -> LoopGroup:
    """All ranks of that group call this together. It listens where gloo would (``GLOO_SOCKET_IFNAME``).

    Raises:
        ConfigError: there is no such group, or this process is not in it.
        PeerLostError: not all came in time.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "torch.distributed is not initialized",
            field="process_group",
            remedy="call torch.distributed.init_process_group before, or leave process_group out",
        )
    group = distributed.group.WORLD if isinstance(ranks, str) else ranks
    rank = distributed.get_rank(group)
    if rank < 0:
        raise ConfigError("this process is not in it", field="process_group", remedy="make the Island in its ranks")
    members = tuple(distributed.get_process_group_ranks(group))
    _opened[members] += 1
    name = f"diloco/{'-'.join(map(str, members))}/{_opened[members]}"
    store = c10d.PrefixStore(name, distributed_c10d._get_default_store())

    def make() -> Any:
        return c10d.ProcessGroupGloo(store, rank, len(members), timedelta(seconds=timeout_s))

    try:
        made = on_own_thread(make, within_s=timeout_s + CLOSE_S)
    except RuntimeError as exc:
        raise lost(exc) from exc
    return LoopGroup(made, store, rank=rank, num_ranks=len(members), timeout_s=timeout_s)
