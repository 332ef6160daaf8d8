"""The outer optimizer of DiLoCo: Nesterov momentum on the pseudo-gradient (Douillard et al., 2023, arXiv 2311.08105).

With g the global parameters, l[i] the local parameters of island i and t[i] the tokens that it trained on since g:

    mean  = sum(t[i] * l[i]) / sum(t[i])
    delta = g - mean                            pseudo-gradient
    m    <- mu * m + delta
    g    <- g - lr * (delta + mu * m)           computed as mean + (1 - lr) * delta - lr * mu * m

The first form of the last line is that of ``torch.optim.SGD(nesterov=True)``. The second is the same number, and rounds
better: with one island, lr = 1 and mu = 0 it is l exactly, while g - (g - l) in fp32 is not where l is small against g.
For the same reason the mean is taken as l[0] + sum(w[i] * (l[i] - l[0])), which is exact when all islands agree.

Everything is fp32. Contributions are added in slot order, so the result does not depend on who came first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from diloco.delayed_nesterov import Delay

BLOCK = 1 << 16
"""Values that are worked on at once, per thread: the six vectors of a step fit the cache, and the calls cost little. A
multiple of what vector instructions take, so that no value is computed in another way than in one piece."""


class Contributed(Protocol):
    """Local parameters of one island at the end of its inner steps, which may be computed when they are asked for."""

    @property
    def tokens(self) -> int: ...

    def part(self, start: int, room: Tensor) -> Tensor:
        """The fp32 values from ``start`` on, as many as ``room`` has: written there, or memory of their own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Those that are there already."""

    local: Tensor  # (parameters,) fp32
    tokens: int

    def part(self, start: int, room: Tensor) -> Tensor:
        return self.local[start : start + room.numel()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The state after an outer step that has not been committed. The next proposal overwrites the tensors."""

    parameters: Tensor  # (parameters,) fp32
    momentum: Tensor  # (parameters,) fp32
    pseudo_gradient_norm: float
    buffer: Tensor | None = None  # (parameters,) fp32
    """Pseudo-gradients that the momentum has yet to take, where it is delayed."""
    delay: Delay | None = None
    """Where the delay stands then, if there is one."""


class OuterOptimizer:
    """Global parameters and momentum, and a step that takes effect only when it is committed.

    A step must be on disk before anyone may see it, so `propose` fills a spare pair of buffers and `commit` swaps the
    pairs. Four vectors are allocated once; none is allocated per step. A step goes through them once, block by block:
    what one operation writes is in the cache for the next.
    """

    def __init__(self, parameters: Tensor, momentum: Tensor, *, lr: float, mu: float) -> None:
        """Take over two fp32 vectors of one size as the state."""
        self.parameters = parameters
        self.momentum = momentum
        self.lr = lr
        self.mu = mu
        self._next_parameters = torch.empty_like(parameters)
        self._next_momentum = torch.empty_like(momentum)

    @torch.no_grad()
    def propose(self, contributions: Mapping[int, Contributed]) -> Proposal:
        """The outer step on the contributions by slot; the state stays as it is until `commit`."""
        norms = []
        mean = _Mean(contributions)
        for start, stop in blocks(self.parameters.numel()):
            part = slice(start, stop)
            parameters, delta = self._next_parameters[part], self._next_momentum[part]
            mean.fill(parameters, start, scratch=delta)
            torch.sub(self.parameters[part], parameters, out=delta)
            norms.append(float(torch.linalg.vector_norm(delta)))
            self._move(parameters, delta, part)
        return Proposal(
            parameters=self._next_parameters,
            momentum=self._next_momentum,
            pseudo_gradient_norm=math.hypot(*norms),
        )

    def _move(self, parameters: Tensor, delta: Tensor, part: slice) -> None:
        """Take the step in this part of the state: ``parameters`` has the mean and gets the next ones, ``delta`` has
        the pseudo-gradient and gets the next momentum.
        """
        parameters.add_(delta, alpha=1.0 - self.lr)
        momentum = delta.add_(self.momentum[part], alpha=self.mu)
        parameters.sub_(momentum, alpha=self.lr * self.mu)

    def commit(self) -> None:
        """Make the step that was proposed last the state."""
        self.parameters, self._next_parameters = self._next_parameters, self.parameters
        self.momentum, self._next_momentum = self._next_momentum, self.momentum


def weighted_mean(contributions: Mapping[int, Contributed], *, out: Tensor, scratch: Tensor) -> Tensor:
    """Token-weighted mean of the local parameters, in slot order."""
    mean = _Mean(contributions)
    for start, stop in blocks(out.numel()):
        mean.fill(out[start:stop], start, scratch=scratch[start:stop])
    return out


def blocks(num_values: int) -> Iterator[tuple[int, int]]:
    """Where each block of a vector starts and ends."""
    size = BLOCK * torch.get_num_threads()
    for start in range(0, num_values, size):
        yield start, min(start + size, num_values)


class _Mean:
    """Token-weighted mean, block by block."""

    def __init__(self, contributions: Mapping[int, Contributed]) -> None:
        total = sum(contribution.tokens for contribution in contributions.values())
        in_order = [contributions[slot] for slot in sorted(contributions)]
        self._first = in_order[0]
        self._others = [(contribution, contribution.tokens / total) for contribution in in_order[1:]]
        self._room = torch.empty(BLOCK * torch.get_num_threads())

    def fill(self, out: Tensor, start: int, *, scratch: Tensor) -> None:
        """Set ``out`` to the mean from ``start`` on."""
        first = self._first.part(start, self._room[: out.numel()])
        out.copy_(first)
        for contribution, share in self._others:
            local = contribution.part(start, scratch)
            out.add_(torch.sub(local, first, out=scratch), alpha=share)
