"""Where a rank computes: the CPU, or one CUDA device, and how it keeps out of the way there.

On a GPU inner steps run on a stream of the lowest priority that CUDA has. That is 0, which ordinary streams have too,
and ranks kernels of one process alone: what ranks a whole process below a server beside it is MPS
(``CUDA_MPS_CLIENT_PRIORITY``, ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``), which the agent sets for its workers.

The host runs ahead of a GPU by as many kernels as fit the queue, so that a gate which closes would stop nothing for a
whole step. `CatchUp` waits at each safepoint until the work before the last one is done: what is queued when the gate
closes is at most what lies between two safepoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diloco.pinned import new_event
from service.errors import ConfigError

CPU = torch.device("cpu")
MEASURE_ON_GPU_S = 15.0
"""Between two norms: 4 bytes per parameter cross the bus for one."""


def choose_device(choice: str, *, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The device of one rank: ``auto`` is CUDA where there is any, ``cuda:N`` that of the first rank.

    The ranks of an island take devices that follow one another, one each: NCCL refuses two ranks on one.

    Raises:
        ConfigError: there is no such device, or there are fewer than ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and count == 0):
        return CPU
    return torch.device("cuda", cuda_index(choice, count=count, rank=rank, num_ranks=num_ranks))


def cuda_index(choice: str, *, count: int, rank: int, num_ranks: int) -> int:
    """Which of ``count`` CUDA devices a rank takes (pure).

    Raises:
        ConfigError: there are too few.
    """
    first = int(choice.partition(":")[2] or 0)
    if count == 0:
        raise ConfigError(
            f"{choice}: torch sees no CUDA device here",
            field="device",
            remedy="give cpu or auto, install a torch with CUDA, or look at CUDA_VISIBLE_DEVICES",
        )
    if first + num_ranks > count:
        wanted = f"{num_ranks} ranks from {first} on" if num_ranks > 1 else f"device {first}"
        raise ConfigError(
            f"{choice}: {wanted} are wanted, there are {count} CUDA devices, numbered from 0",
            field="device",
            remedy="give fewer ranks, another first device, or cpu",
        )
    return first + rank


@contextmanager
def lowest_priority(device: torch.device) -> Iterator[None]:
    """What the calling thread computes in the block goes to a stream of its own, of the lowest priority."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    least, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
    stream = torch.cuda.Stream(device, priority=least)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield


def no_wait() -> None:
    """A host that computes itself has nothing to wait for."""


def catch_up_with(device: torch.device) -> Callable[[], None]:
    """What a safepoint calls before it looks at the gate (`CatchUp`); on a CPU, nothing."""
    if device.type != "cuda":
        return no_wait
    return CatchUp(new_event)


class CatchUp:
    """Keeps the host at most two calls ahead of the device."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        """``new_event`` makes a `torch.cuda.Event`."""
        self._new_event = new_event
        self._last: Any = None

    def __call__(self) -> None:
        # Backward hooks come from autograd's own thread, which has the stream of the forward pass for its current one.
        last, self._last = self._last, self._new_event()
        self._last.record()
        if last is not None:
            last.synchronize()


class NormDue:
    """When the norm of an island's progress is worth its time: from a GPU all parameters have to come for it."""

    def __init__(self, device: torch.device) -> None:
        self._interval_s = 0.0 if device.type == "cpu" else MEASURE_ON_GPU_S
        self._due_s = -math.inf

    def take(self, now_s: float) -> bool:
        """Whether it is due, which then counts as taken."""
        is_due = now_s >= self._due_s
        if is_due:
            self._due_s = now_s + self._interval_s
        return is_due


def device_of(module: nn.Module) -> torch.device:
    """Of its first parameter."""
    return next((parameter.device for parameter in module.parameters()), CPU)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on the device: tensors, also in lists, tuples, mappings, dataclasses, and what has a ``to`` of its own.

    Copies of pinned memory do not wait for the device; of other memory they do.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=batch.device.type == "cpu" and batch.is_pinned())
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return type(batch)({name: moved(value, device) for name, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{f.name: moved(getattr(batch, f.name), device) for f in _init(batch)})
    return batch


def _init(batch: Any) -> Iterator[dataclasses.Field[Any]]:
    return (each for each in dataclasses.fields(batch) if each.init)
