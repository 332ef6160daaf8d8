"""Settings of ``wadiloco island`` that make its inner steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.lr_schedule import ScheduleName, schedule_fault
from service.settings import ServiceSettings

FP16_REFUSED = (
    "fp16 needs loss scaling, which the inner loop has not: give bf16, which has the exponents of fp32, or fp32"
)


def _refuse_fp16(value: Any) -> Any:
    if value in ("fp16", "float16", "half"):
        raise ValueError(FP16_REFUSED)
    return value


class InnerSettings(ServiceSettings):
    """The inner optimizer and its learning rate, of whatever model."""

    lr: float = Field(default=1e-3, gt=0, le=1)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=50, ge=0)
    """Inner steps over which the learning rate rises to its peak."""
    lr_schedule: ScheduleName = "constant"
    """What the learning rate does after the warm-up: constant, or a cosine or linear decay to min_lr, which it has from
    decay_steps on."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Inner step at which the decay is over; it counts from the first step of the run, the warm-up included."""
    min_lr: float = Field(default=0.0, ge=0, le=1)
    """Lowest learning rate of the decay."""
    weight_decay: float = Field(default=0.1, ge=0, lt=1)
    """Decoupled weight decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""

    accumulation_steps: int = Field(default=1, ge=1, le=1 << 16)
    """Batches (of batch_size) whose gradients are added up for one inner step, as if they were one large batch. Keep it
    for as long as a slot is in the run: the position in the data is inner steps times this."""
    precision: Annotated[Literal["fp32", "bf16"], BeforeValidator(_refuse_fp16)] = "fp32"
    """Of forward and backward passes: bf16 runs them under autocast. Parameters, optimizer and what travels stay
    fp32."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the model's layers and compute the rest again in the backward pass: less memory, more
    time, the same gradients."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        fault = schedule_fault(
            self.lr_schedule,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            min_lr=self.min_lr,
            lr=self.lr,
        )
        if fault is not None:
            raise ValueError(fault)
        return self
