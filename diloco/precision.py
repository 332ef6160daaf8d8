"""Mixed precision (Micikevicius et al., 2018, arXiv 1710.03740): forward and backward passes in bf16, all else in fp32.

Under `torch.autocast` matrix products run in bf16, what needs the range or the digits (softmax, norms on a GPU, the
cross-entropy) in fp32. Parameters, gradients, optimizer state and what travels stay fp32. bf16 has the exponents of
fp32, so that gradients do not vanish as in fp16 and no loss scaling is needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from service.errors import ConfigError

Precision = Literal["fp32", "bf16"]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context of one forward pass.

    Raises:
        ConfigError: the GPU cannot compute in bf16.
    """
    if precision == "fp32":
        return nullcontext()
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{name} does not compute in bf16", field="precision", remedy="give --precision fp32")
    return torch.autocast(device.type, dtype=torch.bfloat16)
