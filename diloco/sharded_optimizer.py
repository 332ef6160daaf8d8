"""An inner optimizer whose state is shared out among the ranks of an island, after ZeRO's first stage (Rajbhandari et
al., 2019, arXiv 1910.02054): each parameter has an owner, which alone keeps its moments and moves it; then the owners
give what they moved to the others.

It works with every optimizer of torch that leaves out parameters without a gradient, which are all that this project
knows: before its step the gradients of foreign parameters are taken away, and their state is never made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.group import Group


def shard_optimizer(optimizer: Optimizer, group: Callable[[], Group], *, rank: int, num_ranks: int) -> None:
    """Make the optimizer's next steps those of one rank; all ranks do this, and then step together."""
    owned = owned_parameters(optimizer, num_ranks)
    buffers = [torch.empty(sum(p.numel() for p in part), device=part[0].device if part else None) for part in owned]

    def drop_foreign_gradients(*_: Any) -> None:
        for owner, part in enumerate(owned):
            for each in part:
                if owner != rank:
                    each.grad = None

    def exchange(*_: Any) -> None:
        for source, (part, buffer) in enumerate(zip(owned, buffers, strict=True)):
            if part:
                exchange_part(group(), part, buffer, source=source)

    optimizer.register_step_pre_hook(drop_foreign_gradients)
    optimizer.register_step_post_hook(exchange)


def owned_parameters(optimizer: Optimizer, num_ranks: int) -> list[list[nn.Parameter]]:
    """The parameters that each rank owns."""
    parameters = [parameter for entry in optimizer.param_groups for parameter in entry["params"]]
    owners = share_out([parameter.numel() for parameter in parameters], num_ranks)
    return [[p for p, owner in zip(parameters, owners, strict=True) if owner == rank] for rank in range(num_ranks)]


@torch.no_grad()
def exchange_part(group: Group, parameters: Sequence[nn.Parameter], buffer: Tensor, *, source: int) -> None:
    """Give parameters as they are on the source to all ranks; ``buffer`` (their elements) is overwritten.

    Raises:
        PeerLostError: another rank is gone, or came too late.
    """
    views = [
        view.view_as(parameter)
        for view, parameter in zip(torch.split(buffer, [p.numel() for p in parameters]), parameters, strict=True)
    ]
    if group.rank == source:
        for view, parameter in zip(views, parameters, strict=True):
            view.copy_(parameter)
    group.broadcast(buffer, source=source)
    if group.rank != source:
        for view, parameter in zip(views, parameters, strict=True):
            parameter.copy_(view)


def share_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each part: the largest first, each to the rank that has the least so far."""
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        owner = min(range(num_ranks), key=lambda each: loads[each])
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners
