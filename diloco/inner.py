"""The inner loop of an island: AdamW (Loshchilov & Hutter, 2019) with clipping and a linear warm-up.

A step whose loss or gradient is not finite is skipped and counted: its batch is spent, the parameters stay. What an
island contributes is therefore always finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco.model import next_byte_loss

LOSS_SMOOTHING = 0.05
"""Weight of the newest loss: an average over about the last 20 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 50
    clip_norm: float = 1.0


def warmup_lr(step: int, config: InnerConfig) -> float:
    """Learning rate of the ``step``-th inner step of the run, counted from 0."""
    if config.warmup_steps == 0:
        return config.lr
    return config.lr * min(1.0, (step + 1) / config.warmup_steps)


def smooth(previous: float | None, value: float) -> float:
    return value if previous is None else previous + LOSS_SMOOTHING * (value - previous)


class InnerLoop:
    """Takes inner steps on a module; ``step`` counts those of the run, also the skipped ones."""

    def __init__(
        self,
        module: nn.Module,
        config: InnerConfig,
        *,
        step: int = 0,
        safepoint: Callable[[], None] = lambda: None,
    ) -> None:
        """``safepoint`` is called between the gradients and their use; what it raises leaves the parameters alone."""
        self._module = module
        self._safepoint = safepoint
        self._config = config
        self._optimizer = torch.optim.AdamW(
            module.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.step = step
        self.skipped = 0
        self.loss: float | None = None
        """Smoothed loss (nats per token)."""

    def take_step(self, tokens: Tensor) -> bool:
        """One inner step on (batch, length + 1) tokens; says whether it was applied."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = next_byte_loss(self._module, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self._safepoint()
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._config.clip_norm)
        value = loss.item()
        applied = math.isfinite(value) and math.isfinite(norm.item())
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = warmup_lr(self.step, self._config)
            self._optimizer.step()
            self.loss = smooth(self.loss, value)
        else:
            self.skipped += 1
        self.step += 1
        return applied
