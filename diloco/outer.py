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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from diloco.delayed_nesterov import Delay


class Contributed(Protocol):
    """Local parameters of one island at the end of its inner steps, which may be computed when they are asked for."""

    @property
    def local(self) -> Tensor: ...  # (parameters,) fp32

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Those that are there already."""

    local: Tensor  # (parameters,) fp32
    tokens: int


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
    pairs. Four vectors are allocated once; none is allocated per step.
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
        parameters, momentum = self._next_parameters, self._next_momentum
        weighted_mean(contributions, out=parameters, scratch=momentum)
        delta = torch.sub(self.parameters, parameters, out=momentum)
        norm = float(torch.linalg.vector_norm(delta))
        self._move(parameters, delta, slice(None))
        return Proposal(parameters=parameters, momentum=momentum, pseudo_gradient_norm=norm)

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
    slots = sorted(contributions)
    first = contributions[slots[0]].local
    total = sum(contribution.tokens for contribution in contributions.values())
    out.copy_(first)
    for slot in slots[1:]:
        difference = torch.sub(contributions[slot].local, first, out=scratch)
        out.add_(difference, alpha=contributions[slot].tokens / total)
    return out
