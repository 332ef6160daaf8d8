"""Nested state as JSON and tensors: what optimizers and generators keep, without pickle (pure).

Tensors get names and leave a reference; dicts, lists, tuples, numbers, strings, booleans and None stay as they are, and
come back as the types that they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diloco.vault.errors import CorruptError, VaultError

TENSOR, TUPLE, ITEMS, FLOAT = "$t", "$p", "$i", "$f"


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold of ``value``; its tensors are added to ``tensors``, under names that begin with ``name``.

    Raises:
        VaultError: there is something else in it.
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: str(value)}
    if isinstance(value, tuple):
        return {TUPLE: [pack(each, f"{name}/{i}", tensors) for i, each in enumerate(value)]}
    if isinstance(value, list):
        return [pack(each, f"{name}/{i}", tensors) for i, each in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: pack(each, f"{name}/{key}", tensors) for key, each in value.items()}
        if all(isinstance(key, str | int) for key in value):
            return {ITEMS: [[key, pack(each, f"{name}/{key}", tensors)] for key, each in value.items()]}
    raise VaultError(
        f"{name} is of type {type(value).__name__}, which a snapshot cannot hold",
        field="vault",
        remedy="keep tensors, numbers, strings, lists, tuples and dicts in the optimizer's state",
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given, with these tensors in it.

    Raises:
        CorruptError: it is none of what `pack` returns.
    """
    if isinstance(value, list):
        return [unpack(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        if TENSOR in value:
            return tensors[value[TENSOR]]
        if FLOAT in value:
            return float(value[FLOAT])
        if TUPLE in value:
            return tuple(unpack(each, tensors) for each in value[TUPLE])
        if ITEMS in value:
            return {key: unpack(each, tensors) for key, each in value[ITEMS]}
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptError(f"state that is none: {type(exc).__name__}: {exc}", field="vault") from exc
    return {key: unpack(each, tensors) for key, each in value.items()}
