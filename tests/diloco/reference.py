"""The mathematics of outer rounds once more, in NumPy and fp64 and as the papers write it: pseudo-gradients, not means.

Nothing here knows of torch, buffers, files or wires. What the tests compare with it is in ``test_reference``.

    d[i]  = b[i] - l[i]                                        pseudo-gradient; DiLoCo, arXiv 2311.08105
    w(s)  = (1 + s)^-alpha                                     staleness; FedAsync, arXiv 1903.03934
    delta = sum(t[i] * w(s[i]) * d[i]) / sum(t[i])             tokens as weights; buffered: FedBuff, arXiv 2106.06639
    m    <- mu * m + delta
    g    <- g - lr * (delta + mu * m)                          Nesterov as in torch.optim.SGD; mu = 0 is plain SGD
    b    <- b + delta, and once in N steps m <- mu * m + b / N, b <- 0;
    g    <- g - lr * (delta / N + a * mu * m), a = 1 - c * N + c then, else c      delayed Nesterov, arXiv 2401.09135
    l    <- g' + (l - l at the push)                           delayed application; Streaming DiLoCo, arXiv 2501.18512
    c     = d + e,   e <- c - Q(c)                             error feedback; arXiv 1901.09847
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Quantise = Callable[[Vector], Vector]
"""Encode and decode."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one island gives to a step."""

    pseudo_gradient: Vector
    tokens: int
    staleness: int = 0


def staleness_weight(staleness: int, exponent: float) -> float:
    return float((1 + staleness) ** -exponent)


def mean_pseudo_gradient(terms: Sequence[Term], *, exponent: float = 0.5) -> Vector:
    """Weighted by tokens; what staleness takes from one is not given to the others."""
    total = sum(term.tokens for term in terms)
    delta: Vector = np.zeros_like(terms[0].pseudo_gradient)
    for term in terms:
        weight = term.tokens / total * staleness_weight(term.staleness, exponent)
        delta = delta + weight * term.pseudo_gradient
    return delta


@dataclass
class Outer:
    """Global parameters and momentum."""

    parameters: Vector
    momentum: Vector
    lr: float
    mu: float

    def step(self, delta: Vector) -> None:
        self.momentum = self.mu * self.momentum + delta
        self.parameters = self.parameters - self.lr * (delta + self.mu * self.momentum)


@dataclass
class Delayed(Outer):
    """The same with momentum once every ``num_steps`` steps."""

    num_steps: int
    activation: float
    received: list[Vector] = field(default_factory=list)
    """Pseudo-gradients since the momentum's last step."""

    def step(self, delta: Vector) -> None:
        self.received.append(delta)
        weight = self.activation
        if len(self.received) == self.num_steps:
            self.momentum = self.mu * self.momentum + np.mean(self.received, axis=0)
            weight = 1 - self.activation * self.num_steps + self.activation
            self.received = []
        move = delta / self.num_steps + weight * self.mu * self.momentum
        self.parameters = self.parameters - self.lr * move


@dataclass
class Member:
    """An island: local parameters, the global ones that they started from, and what is in a round."""

    local: Vector
    base: Vector
    version: int = 0
    steps: int = 0
    tokens: int = 0
    owed: Vector = field(default_factory=lambda: np.zeros(0))
    quantise: Quantise | None = None
    pushed: Vector | None = None
    """Local parameters as they were at the push; after a stale one, where the new global parameters put them."""
    pushed_into: int = -1
    pushed_work: tuple[int, int] = (0, 0)
    left_out: Vector | None = None

    def train(self, change: Vector, tokens: int) -> None:
        self.local = self.local + change
        self.steps += 1
        self.tokens += tokens

    def push(self, *, into: int) -> Vector:
        """What the round gets for a pseudo-gradient."""
        self.pushed, self.pushed_into, self.pushed_work = self.local.copy(), into, (self.steps, self.tokens)
        wanted = self.base - self.local
        if self.quantise is None:
            return wanted
        wanted = wanted + (self.owed if self.owed.size else np.zeros_like(wanted))
        sent = self.quantise(wanted)
        self.left_out = wanted - sent
        return sent

    def adopt(self, new_global: Vector, version: int) -> None:
        """Progress that is not in the new global parameters is kept on top of them."""
        merged = self.pushed is not None and version > self.pushed_into
        if merged:
            assert self.pushed is not None
            self.local = new_global + (self.local - self.pushed)
            self.steps -= self.pushed_work[0]
            self.tokens -= self.pushed_work[1]
            self.owed = self.left_out if self.left_out is not None else self.owed
        else:
            self.local = new_global + (self.local - self.base)
        self.base, self.version = new_global.copy(), version
        self.pushed = self.left_out = None

    def carry(self, new_global: Vector, version: int) -> None:
        """Go on from parameters that the stale contribution is not in yet; it will be in the next ones."""
        assert self.pushed is not None
        moved = self.pushed - self.base + new_global
        kept = (self.pushed_into, self.pushed_work, self.left_out)
        self.pushed = None
        self.adopt(new_global, version)
        self.pushed, (self.pushed_into, self.pushed_work, self.left_out) = moved, kept
