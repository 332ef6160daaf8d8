"""The inner loop of an island: AdamW (Loshchilov & Hutter, 2019) with clipping and a linear warm-up.

A step whose loss or gradient is not finite is skipped and counted: its batch is spent, the parameters stay. What an
island contributes is therefore always finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.model import next_byte_loss
from service.errors import InputError

LOSS_SMOOTHING = 0.05
"""Weight of the newest loss: an average over about the last 20 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 50
    clip_norm: float = 1.0


def warmup_lr(step: int, config: InnerConfig, *, peak: float | None = None) -> float:
    """Learning rate of the ``step``-th inner step of the run, counted from 0; its peak is by default the config's."""
    peak = config.lr if peak is None else peak
    if config.warmup_steps == 0:
        return peak
    return peak * min(1.0, (step + 1) / config.warmup_steps)


def adamw(module: nn.Module, config: InnerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def checked_loss(loss: object) -> Tensor:
    """A loss that can be minimized.

    Raises:
        InputError: it is not a tensor of shape (), or has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(f"the loss is {shown}, not a scalar tensor", field="workload", remedy="return loss.mean()")
    if not loss.requires_grad:
        raise InputError(
            "the loss has no gradient",
            field="workload",
            remedy="compute it from the model's output, without detach, item or no_grad",
        )
    return loss


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
        loss: Callable[[nn.Module, Any], Tensor] = next_byte_loss,
        optimizer: Optimizer | None = None,
        average: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        """``safepoint`` is called between the gradients and their use; what it raises leaves the parameters alone.

        ``loss`` makes a scalar of the module and a batch; ``optimizer`` is by default `adamw`. The learning rates that
        its groups have here are their peaks. ``average`` is called with the loss when the gradients are complete: it
        makes them those of all ranks, and returns the mean loss.
        """
        self._module = module
        self._safepoint = safepoint
        self._config = config
        self._loss_of = loss
        self._average = average
        self._optimizer = adamw(module, config) if optimizer is None else optimizer
        self._peaks = [group["lr"] for group in self._optimizer.param_groups]
        self.step = step
        self.skipped = 0
        self.loss: float | None = None
        """Smoothed loss, in its own unit: nats per token for the byte GPT."""

    def take_step(self, batch: object) -> bool:
        """One inner step on a batch, of the byte GPT (batch, length + 1) tokens; says whether it was applied.

        Raises:
            InputError: the loss is not one, see `checked_loss`.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss = checked_loss(self._loss_of(self._module, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self._safepoint()
        loss = self._average(loss.detach())
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._config.clip_norm)
        value = loss.item()
        applied = math.isfinite(value) and math.isfinite(norm.item())
        if applied:
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = warmup_lr(self.step, self._config, peak=peak)
            self._optimizer.step()
            self.loss = smooth(self.loss, value)
        else:
            self.skipped += 1
        self.step += 1
        return applied
