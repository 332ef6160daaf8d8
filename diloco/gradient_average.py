"""The mean gradient of an inner step whose batch the ranks of an island share out among themselves.

With l_r the mean loss of rank r's part and t_r its tokens, the mean loss of the whole batch is l = Σ t_r·l_r / Σ t_r,
and so is its gradient g = Σ t_r·g_r / Σ t_r: an island of N ranks takes the steps that one rank would take on the whole
batch, up to the rounding of sums in another order.

The sum runs in buckets after the backward pass, and not beside it as in torch's DDP: hooks at the layers may wait for
the gate there (`diloco.safepoint`), and nobody may do so inside a collective. All ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from diloco.group import Group

BUCKET_BYTES = 25 << 20
"""As DDP's: long enough to fill a link, short enough that copying one overlaps with sending another."""


class GradientAverage:
    """Averages the gradients of some parameters over a group, in place; holds one vector of their size."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._views = [
            view.view_as(parameter)
            for view, parameter in zip(torch.split(self._flat, sizes), self._parameters, strict=True)
        ]
        self._bounds = list(bucket_bounds(sizes, BUCKET_BYTES // self._flat.element_size()))

    @property
    def scratch(self) -> Tensor:
        """One fp32 element per element of the parameters, free between two steps."""
        return self._flat

    def __call__(self, group: Group, loss: Tensor, num_tokens: int) -> tuple[Tensor, int]:
        """The mean loss (a scalar) over all ranks, and all their tokens; the gradients are then the mean ones.

        A parameter without a gradient counts as one of zeros, unless no rank has one: then it stays without.

        Raises:
            PeerLostError: another rank is gone, or came too late.
        """
        has_gradient = [float(parameter.grad is not None) for parameter in self._parameters]
        # On the CPU also beside a GPU: over gloo a peer that died is seen here, before a sum that would hang.
        told = torch.tensor([num_tokens, loss.item() * num_tokens, *has_gradient], dtype=torch.float64)
        group.start_sum(told).wait()
        total_tokens, weighted_loss, *num_gradients = told.tolist()
        self._sum(group, num_tokens / total_tokens, num_gradients)
        return torch.tensor(weighted_loss / total_tokens), int(total_tokens)

    @torch.no_grad()
    def _sum(self, group: Group, weight: float, num_gradients: Sequence[float]) -> None:
        sums = []
        for first, last in pairwise(self._bounds):
            for parameter, view in zip(self._parameters[first:last], self._views[first:last], strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    torch.mul(parameter.grad, weight, out=view)
            sums.append(group.start_sum(self._bucket(first, last)))
        for each in sums:
            each.wait()
        for parameter, view, count in zip(self._parameters, self._views, num_gradients, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(view)
            elif count:
                parameter.grad = view.clone()

    def _bucket(self, first: int, last: int) -> Tensor:
        start = sum(view.numel() for view in self._views[:first])
        return self._flat[start : start + sum(view.numel() for view in self._views[first:last])]


def bucket_bounds(sizes: Sequence[int], bucket_size: int) -> Iterator[int]:
    """Where buckets begin in a row of sizes, and the end: each is full or the last, and none is empty."""
    yield 0
    filled = 0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= bucket_size and index + 1 < len(sizes):
            yield index + 1
            filled = 0
    yield len(sizes)
