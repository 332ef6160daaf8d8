"""What changes at every inner step: parameters, buffers, the inner optimizer's state, random numbers.

Parameters and the optimizer's state stand still while the next step computes its gradients, so they are copied beside
it. All else is captured at the step boundary: buffers, which a forward pass may change, and the generators.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.fragment import trainable
from diloco.resume import random_state, restore_random_state
from diloco.vault.errors import CorruptError, ForeignError
from diloco.vault.part import PartReader
from diloco.vault.tree import pack, unpack

HYPERPARAMETERS = frozenset({"betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "fused", "foreach"})
"""Of an optimizer's groups: the settings say them, not a snapshot."""


@dataclass(frozen=True, slots=True)
class Hot:
    """One rank's state at a step boundary."""

    early: dict[str, Tensor]
    """To be copied before the next step begins."""
    late: dict[str, Tensor]
    """Unchanged until the next step is applied."""
    state: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.early | self.late


class HotState:
    """The module and the optimizer of a rank."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = {f"parameter/{name}": parameter for name, parameter in trainable(module).items()}
        self._module = module
        self._optimizer = optimizer
        self._owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    @property
    def model(self) -> str:
        """Digest of what a snapshot must fit."""
        shapes = [[name, str(t.dtype), list(t.shape)] for name, t in {**self._parameters, **self._buffers()}.items()]
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        told = [shapes, type(self._optimizer).__qualname__, groups]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]

    def capture(self) -> Hot:
        """What there is to copy; copies nothing itself but random numbers.

        Raises:
            VaultError: the optimizer keeps what no snapshot can hold.
        """
        late: dict[str, Tensor] = dict(self._parameters)
        index = {parameter: i for i, parameter in enumerate(self._owned)}
        states = {
            str(index[key]) if isinstance(key, Tensor) else f"+{key}": value
            for key, value in self._optimizer.state.items()
        }
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        state = {"optimizer": pack(states, "optimizer", late), "groups": pack(groups, "group", late)}
        early = self._buffers()
        state["random"] = pack(_generators(), "random", early)
        return Hot(early=early, late=late, state=state)

    def room_for_more(self) -> int:
        """Bytes that the optimizer's state may still grow by: parameters that had no gradient yet have none."""
        sizes = {
            parameter: sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor))
            for parameter, state in self._optimizer.state.items()
            if isinstance(parameter, Tensor) and isinstance(state, Mapping)
        }
        per_value = max((size / max(p.numel(), 1) for p, size in sizes.items() if p.numel() >= _MANY), default=8.0)
        missing = [p for p in self._owned if p not in sizes and p.requires_grad]
        return int(sum(p.numel() for p in missing) * per_value) + _PER_TENSOR * len(missing)

    @torch.no_grad()
    def restore(self, part: PartReader) -> None:
        """Become what was captured, tensor by tensor. Random numbers come last, with `restore_random`.

        Raises:
            ForeignError, CorruptError: it does not fit.
        """
        for name, tensor in {**self._parameters, **self._buffers()}.items():
            _copy(part, name, tensor)
        tensors = _Reader(part)
        states = unpack(part.state["optimizer"], tensors)
        self._optimizer.state.clear()
        for key, value in states.items():
            self._optimizer.state[key[1:] if key.startswith("+") else self._owned[int(key)]] = self._own(key, value)
        for group, saved in zip(self._optimizer.param_groups, unpack(part.state["groups"], tensors), strict=True):
            group.update({k: _cloned(v) for k, v in saved.items() if k not in HYPERPARAMETERS})

    def _own(self, key: str, value: Any) -> Any:
        """State in memory of its own, on the parameter's device, laid out as the parameter where it has its shape."""
        if key.startswith("+") or not isinstance(value, Mapping):
            return _cloned(value)
        parameter = self._owned[int(key)]

        def own(each: Any) -> Any:
            if isinstance(each, Tensor) and each.shape == parameter.shape and each.dim() > 0:
                return torch.empty_like(parameter, dtype=each.dtype, requires_grad=False).copy_(each)
            return _cloned(each)

        return {name: own(each) for name, each in value.items()}

    def _buffers(self) -> dict[str, Tensor]:
        persistent = set(self._module.state_dict(keep_vars=True))
        return {f"buffer/{name}": each for name, each in self._module.named_buffers() if name in persistent}


_MANY = 64
"""A parameter with so many values tells what the optimizer keeps for each."""
_PER_TENSOR = 512


def restore_random(part: PartReader) -> None:
    """Let all generators go on from there."""
    saved = unpack(part.state["random"], _Reader(part))
    restore_random_state({"cpu": saved["cpu"].clone(), "cuda": [each.clone() for each in saved["cuda"]]})
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(_unsigned(words).tolist()), gauss))
    kind, words, *rest = saved["numpy"]
    np.random.set_state((kind, _unsigned(words), *rest))


def _generators() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, np_words, *rest = np.random.get_state(legacy=True)
    return {
        **random_state(),
        "python": (version, _signed(words), gauss),
        "numpy": (str(kind), _signed(np_words), *(_plain(each) for each in rest)),
    }


def _signed(words: Any) -> Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def _unsigned(words: Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return words.clone().numpy().view(np.uint32)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


class _Reader(Mapping[str, Tensor]):
    """The tensors of a part by name."""

    def __init__(self, part: PartReader) -> None:
        self._part = part

    def __getitem__(self, name: str) -> Tensor:
        return self._part.tensor(name)

    def __iter__(self) -> Any:
        return iter(self._part.names())

    def __len__(self) -> int:
        return len(self._part.names())


def _copy(part: PartReader, name: str, tensor: Tensor) -> None:
    try:
        place = part.place(name)
    except CorruptError as exc:
        raise ForeignError(f"has no {name}", field="vault") from exc
    if place.shape != tuple(tensor.shape) or place.dtype != tensor.dtype:
        raise ForeignError(f"{name} is {place.dtype} {list(place.shape)} there", field="vault")
    tensor.copy_(part.tensor(name))


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _cloned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(each) for each in value)
    return value
