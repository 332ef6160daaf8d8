"""Loading a workload and taking its parts: of foreign code every fault becomes one line with the field ``workload``.

Traces go to the log, for whoever wrote the workload. What the agent can see without running it is in
`diloco.workload_source`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from diloco.activation_checkpointing import checkpoint_activations
from diloco.fragment import trainable
from diloco.inner import InnerConfig
from diloco.workload import Part, Shard, Workload
from diloco.workload_source import FIELD, find_module, missing_factory, split_name
from service.errors import InputError, UnavailableError, WadilocoError

logger = logging.getLogger(__name__)

WHOLE = Part()


def load_workload(name: str, options: Mapping[str, str]) -> Workload[Any]:
    """Import ``MODULE:FACTORY`` and call the factory with the options as keyword arguments.

    Raises:
        InputError: there is no such module or factory, one of them raised, or what came back is no `Workload`.
    """
    module_name, factory_name = split_name(name)
    origin = find_module(module_name).origin
    _look_in_working_directory_last()
    with blamed(f"importing {module_name}"):
        module = importlib.import_module(module_name)
    factory: Callable[..., Any] | None = getattr(module, factory_name, None)
    if factory is None:
        raise missing_factory(module_name, factory_name, origin)
    if not callable(factory):
        raise refused(
            f"{name} is of type {type(factory).__name__} and cannot be called",
            "give a function that returns a Workload",
        )
    shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
    with blamed(f"{factory_name}({shown})", "correct it or workload_options"):
        workload = factory(**options)
    if not isinstance(workload, Workload):
        raise refused(
            f"{name} returned {_kind(workload)}, which is no diloco.workload.Workload",
            "return an instance of a subclass of it",
        )
    return workload


def build_module(workload: Workload[Any], *, seed: int) -> nn.Module:
    """The model, which can be trained and sent.

    Raises:
        InputError: it cannot be built, has nothing to train, or trains parameters that are not float32.
    """
    with blamed("build_model"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = workload.build_model(seed=seed)
    if not isinstance(module, nn.Module):
        raise refused(f"build_model returned {_kind(module)}, not a torch.nn.Module", "return the model")
    parameters = trainable(module)
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise refused(f"parameter {name} has no shape yet", "run a batch through the model in build_model")
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise refused(
                f"parameter {name} is {dtype}, and only float32 is trained: small updates would vanish in less",
                "keep it in float32 and compute the loss under torch.autocast, or freeze it",
            )
    if not any(parameter.numel() for parameter in parameters.values()):
        raise refused("the model has no parameters to train", "set requires_grad on some")
    return module


def build_checkpointed_module(workload: Workload[Any], *, seed: int) -> nn.Module:
    """As `build_module`, with the layers that the workload names under activation checkpointing.

    Raises:
        InputError: it names none, or something else.
    """
    module = build_module(workload, seed=seed)
    with blamed("checkpointed_layers"):
        layers = list(workload.checkpointed_layers(module))
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise refused(
            "checkpointed_layers names no layers of the model",
            "return its blocks there, use torch.utils.checkpoint in the model, or leave out --activation-checkpointing",
        )
    checkpoint_activations(layers)
    return module


def build_optimizer(workload: Workload[Any], module: nn.Module, config: InnerConfig) -> Optimizer:
    """The inner optimizer.

    Raises:
        InputError: it cannot be built, or is none.
    """
    with blamed("build_optimizer"):
        optimizer = workload.build_optimizer(module, config)
    if not isinstance(optimizer, Optimizer):
        raise refused(f"build_optimizer returned {_kind(optimizer)}, not a torch.optim.Optimizer", "return one")
    return optimizer


def open_batches(workload: Workload[Any], shard: Shard, part: Part = WHOLE, *, position: int) -> Iterator[Any]:
    """The batches from ``position`` on; the first is made here, so that what keeps it from being made is known.

    Raises:
        InputError: they cannot be opened, end or hold None; also from the iterator.
        UnavailableError: see `blamed`.
    """
    with blamed("batches"):
        batches = workload.rank_batches(shard, part, position=position)
    if not isinstance(batches, Iterator):
        raise refused(f"batches returned {_kind(batches)}, not an iterator", "write it with yield, or return iter(…)")
    endless = _endless(batches, position)
    with blamed(f"batch {position}"):
        first = next(endless)
    return chain([first], endless)


def count_tokens(workload: Workload[Any], batch: object) -> int:
    """What the batch stands for.

    Raises:
        InputError: not a whole number of at least 1.
    """
    count = workload.count_tokens(batch)
    if not isinstance(count, int) or count < 1:
        raise refused(f"count_tokens returned {count!r}", "return a whole number of at least 1")
    return count


@contextmanager
def blamed(what: str, remedy: str = "correct it: the trace is in the log") -> Iterator[None]:
    """Whatever the block raises is the fault of the workload.

    Raises:
        InputError: it raised.
        UnavailableError: it lacked a file, a connection or memory, which may be there at the next start.
    """
    try:
        yield
    except WadilocoError:
        raise
    except (Exception, SystemExit) as exc:
        raise fault(exc, what, remedy) from exc


def fault(exc: BaseException, what: str, remedy: str = "correct it: the trace is in the log") -> WadilocoError:
    """The one line for an exception of the workload; its trace is logged."""
    logger.error("%s failed", what, exc_info=exc)
    kind = UnavailableError if isinstance(exc, OSError | MemoryError) else InputError
    message = next(iter(str(exc).splitlines()), "")
    return kind(f"{what} raised {type(exc).__name__}: {message}", field=FIELD, remedy=remedy)


def failed_step(exc: BaseException, *, step: int, is_first: bool) -> WadilocoError:
    """That of an inner step which another worker would fail at, too: its first, or one that was taken once more."""
    return fault(exc, "the first inner step" if is_first else f"inner step {step}, once more,")


def refused(message: str, remedy: str) -> InputError:
    return InputError(message, field=FIELD, remedy=remedy)


def _endless(batches: Iterator[Any], position: int) -> Iterator[Any]:
    for batch in batches:
        if batch is None:
            raise refused(f"batch {position} is None", "yield what the loss takes")
        yield batch
        position += 1
    raise refused(f"the batches ended at {position}", "go on with a new epoch: batches has no end")


def _look_in_working_directory_last() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def _kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"
