"""The inner loop of an island: AdamW (Loshchilov & Hutter, 2019) with clipping and a learning-rate schedule.

A step whose loss or gradient is not finite is skipped and counted: its batch is spent, the parameters stay. What an
island contributes is therefore always finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.device import device_of, moved
from diloco.lr_schedule import LrSchedule, ScheduleName, lr_share
from diloco.model import next_byte_loss
from diloco.precision import Precision, autocast
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
    lr_schedule: ScheduleName = "constant"
    decay_steps: int | None = None
    """Inner step at which a decaying learning rate is at its lowest; counts from the first step of the run."""
    min_lr: float = 0.0
    """Lowest learning rate of a group whose peak is ``lr``; of other groups in proportion."""
    precision: Precision = "fp32"
    """Of the forward pass; parameters and gradients are fp32."""

    @property
    def schedule(self) -> LrSchedule:
        return LrSchedule(
            name=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            floor=self.min_lr / self.lr,
        )


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
        """``safepoint`` is called after each backward pass, before the gradients are used; what it raises leaves the
        parameters alone.

        ``loss`` makes a scalar of the module and a batch; ``optimizer`` is by default `adamw`. The learning rates that
        its groups have here are their peaks. ``average`` is called with the loss when the gradients are complete: it
        makes them those of all ranks, and returns the mean loss.
        """
        self._module = module
        self._safepoint = safepoint
        self._config = config
        self._schedule = config.schedule
        self._loss_of = loss
        self._average = average
        self._device = device_of(module)
        autocast(config.precision, self._device)  # what cannot work is told before the first step
        self._optimizer = adamw(module, config) if optimizer is None else optimizer
        self._peaks = [group["lr"] for group in self._optimizer.param_groups]
        self.step = step
        self.skipped = 0
        self.loss: float | None = None
        """Smoothed loss, in its own unit: nats per token for the byte GPT."""

    @property
    def lr(self) -> float:
        """That of the last step that was applied, of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def take_step(self, *batches: Any, tokens: Sequence[int] = ()) -> bool:
        """One inner step on a batch, of the byte GPT (batch, length + 1) tokens; says whether it was applied.

        Batches are moved to the module's device. Of several the gradients are added up, so that the step is that of one
        large batch: each counts by its number of ``tokens``, which its loss is the mean over (left out: all the same).
        Clipping and the decision whether to skip come after the last of them.

        Raises:
            InputError: the loss is not one, see `checked_loss`.
        """
        self._optimizer.zero_grad(set_to_none=True)
        value = self._add_gradients(batches, tokens or [1] * len(batches))
        value = self._average(torch.tensor(value)).item()
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._config.clip_norm)
        applied = math.isfinite(value) and math.isfinite(norm.item())
        if applied:
            share = lr_share(self.step, self._schedule)
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * share
            self._optimizer.step()
            self.loss = smooth(self.loss, value)
        else:
            self.skipped += 1
        self.step += 1
        return applied

    def _add_gradients(self, batches: Sequence[Any], tokens: Sequence[int]) -> float:
        """Forward and backward passes of a step; returns its loss, the mean over all tokens."""
        total = sum(tokens)
        losses = []
        for batch, num_tokens in zip(batches, tokens, strict=True):
            with autocast(self._config.precision, self._device):
                loss = checked_loss(self._loss_of(self._module, moved(batch, self._device)))
            if len(batches) > 1:
                loss = loss * (num_tokens / total)
            loss.backward()  # type: ignore[no-untyped-call]
            self._safepoint()
            losses.append(loss.detach().float())
        return torch.stack(losses).sum().item()
