"""NCCL between the GPUs of an island's ranks, with an end to every wait.

A communicator is made when it is first used, and that waits for the other ranks without a deadline; a collective whose
peer is gone spins on the GPU until somebody aborts the communicator. So the first collective is run here, on a thread
that its caller gives up at the deadline; every later one is waited for with a timeout on the host, after which torch
aborts the communicator and raises; and a group that is given up is aborted (`abort`).

That torch's own watchdog takes the process down instead is not wanted, since it cannot say why: with
``TORCH_NCCL_BLOCKING_WAIT`` there is none, and errors are raised where they are waited for
(https://pytorch.org/docs/stable/torch_nccl_environment_variables.html, ProcessGroupNCCL.cpp of torch 2.6 and later).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from service.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "nccl"
"""Its keys are numbers, as gloo's are: each has a part of the store."""


def open_nccl(store: c10d.Store, *, rank: int, num_ranks: int, timeout_s: float, device: torch.device) -> Any:
    """The backend, connected; blocks until all ranks have come, for ever if one does not.

    Raises:
        ConfigError: this torch has no NCCL, or there is no such GPU.
        RuntimeError: a rank is gone.
    """
    if not (distributed.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError("this torch has no NCCL, or no GPU", field="device", remedy="give --device cpu")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    # Of the calling thread: the communicator is made for it.
    torch.cuda.set_device(device)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.is_high_priority_stream = False
    backend: Any = c10d.ProcessGroupNCCL(c10d.PrefixStore(PREFIX, store), rank, num_ranks, options)
    first = c10d.AllreduceOptions()
    first.timeout = timedelta(seconds=timeout_s)
    backend.allreduce([torch.zeros(1, device=device)], first).wait(timedelta(seconds=timeout_s))
    return backend


def abort(backend: Any) -> None:
    """End what still runs on the GPU; may block where a peer hangs, so call it on a thread that can be given up."""
    try:
        backend.abort()
    except RuntimeError as exc:
        logger.warning("a communicator could not be aborted error=%s", next(iter(str(exc).splitlines()), ""))
