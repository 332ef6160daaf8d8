"""What a process does before it knows what to train, so that its first inner step has nothing left to load."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from diloco.data import read_ahead
from diloco.inner import InnerConfig, InnerLoop
from service.errors import InputError


def warm_up() -> None:
    """One step of a tiny model: what torch loads at its first is loaded then."""
    module = nn.Linear(2, 2)
    inner = InnerLoop(module, InnerConfig(), loss=lambda model, batch: model(batch).square().mean())
    inner.take_step(torch.ones(2, 2))


def read_corpus(paths: Sequence[Path]) -> None:
    """Read the text now; what cannot be read is for the worker to tell, if it comes to that."""
    with contextlib.suppress(InputError):
        read_ahead(paths)
