"""Delayed Nesterov: momentum once every N outer steps, plain steps on the pseudo-gradient between (Liu et al., 2024,
Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135).

Momentum on stale pseudo-gradients is what hurts asynchronous training: it goes on in directions that are out of date,
at every step. With delta the pseudo-gradient of a step, N the delay and c the activation, 0 <= c <= 1/N,

    b <- b + delta
    every Nth step:    m <- mu * m + b / N,   g <- g - lr * (delta / N + (1 - c * N + c) * mu * m),   b <- 0
    all other steps:                          g <- g - lr * (delta / N + c * mu * m)

so that N steps move g by as much as one Nesterov step on the mean of their pseudo-gradients does; c spreads the part of
the momentum over them, 0 (the paper's default) leaves it to the Nth. With N = 1 it is the step of `diloco.outer`, to
the last bit. The paper takes a step for each contribution; here a step is one round, whose pseudo-gradient is the mean
of its contributions: with a quorum of one both are the same.

A step is computed as there, from the mean l of the local parameters: g - lr / N * delta = l + (1 - lr / N) * delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.outer import Contributed, OuterOptimizer, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """What a delayed step depends on, beside vectors."""

    num_steps: int
    """N: outer steps for one of the momentum."""
    activation: float = 0.0
    """c: share of the momentum in the steps between, at most 1/N."""
    position: int = 0
    """Steps since the last one of the momentum, below N."""

    @property
    def is_momentum_due(self) -> bool:
        return self.position + 1 >= self.num_steps

    @property
    def momentum_weight(self) -> float:
        """Of the momentum in the next step."""
        return self.activation + (1.0 - self.activation * self.num_steps if self.is_momentum_due else 0.0)

    def next(self) -> Delay:
        """After one more step."""
        return replace(self, position=0 if self.is_momentum_due else self.position + 1)


class DelayedNesterov(OuterOptimizer):
    """The outer optimizer with two more vectors: what the momentum has yet to take, and its spare."""

    def __init__(
        self,
        parameters: Tensor,
        momentum: Tensor,
        *,
        lr: float,
        mu: float,
        delay: Delay,
        buffer: Tensor | None = None,
    ) -> None:
        """Take over fp32 vectors of one size as the state; without a ``buffer`` none has been added up."""
        super().__init__(parameters, momentum, lr=lr, mu=mu)
        self.delay = delay
        self.buffer = torch.zeros_like(parameters) if buffer is None else buffer
        self._next_buffer = torch.empty_like(self.buffer)

    def propose(self, contributions: Mapping[int, Contributed]) -> Proposal:
        """As `OuterOptimizer.propose`; the proposal also has what is added up, and where the delay stands."""
        return replace(super().propose(contributions), buffer=self._next_buffer, delay=self.delay.next())

    def commit(self) -> None:
        """Make the step that was proposed last the state."""
        super().commit()
        self.buffer, self._next_buffer = self._next_buffer, self.buffer
        self.delay = self.delay.next()

    def _move(self, parameters: Tensor, delta: Tensor, part: slice) -> None:
        share = 1.0 / self.delay.num_steps
        summed = torch.add(self.buffer[part], delta, out=self._next_buffer[part])
        parameters.add_(delta, alpha=1.0 - self.lr * share)
        if self.delay.is_momentum_due:
            torch.add(summed.mul_(share), self.momentum[part], alpha=self.mu, out=delta)
            summed.zero_()
        else:
            delta.copy_(self.momentum[part])
        parameters.sub_(delta, alpha=self.lr * self.mu * self.delay.momentum_weight)
