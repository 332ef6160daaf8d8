"""Activation checkpointing (Chen et al., 2016, arXiv 1604.06174): layers keep their inputs alone, and compute the rest
of what their backward pass needs once more.

A layer's own ``forward`` is wrapped, not the layer: names of parameters and hooks stay what they are. Random numbers
(dropout) are drawn again as they were, so that gradients are the same. A safepoint within a layer is passed in the
second forward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(layers: Iterable[nn.Module]) -> int:
    """Make the layers forget their activations; returns how many there are. A layer must not be inside another."""
    count = 0
    for layer in layers:
        layer.forward = _recomputed(layer.forward)
        count += 1
    return count


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
