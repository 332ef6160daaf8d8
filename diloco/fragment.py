"""The parameters of a model as one flat fp32 vector, in an order on which all islands agree.

Wire order: trainable parameters sorted by name; a parameter that several modules share (tied) occurs once, under the
name of its first registration. Frozen parameters and buffers do not travel. Pseudo-gradients use the same order.
Where the model is cut into fragments (`diloco.partition`), ``names`` are the parameters of one; None: all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from diloco import pinned
from diloco.schema import Manifest, TensorSpec
from diloco.tensorfile import FP32_BYTES
from service.errors import InputError

SHIFT_BLOCK = 1 << 18
"""Values that are worked on at once: the second addition finds them in the cache."""


def trainable(module: nn.Module, *, names: Collection[str] | None = None) -> dict[str, nn.Parameter]:
    """The parameters that travel, in wire order."""
    found = ((name, p) for name, p in module.named_parameters() if names is None or name in names)
    return dict(sorted((name, p) for name, p in found if p.requires_grad))


def manifest_of(module: nn.Module, *, names: Collection[str] | None = None) -> Manifest:
    """Names, shapes and types of the parameters that travel, in wire order.

    Raises:
        InputError: nothing in the module can be trained.
    """
    specs = tuple(
        TensorSpec(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
        for name, p in trainable(module, names=names).items()
    )
    if num_elements(specs) == 0:
        raise InputError("has no trainable parameters", field="model", remedy="set requires_grad on some")
    return Manifest(tensors=specs)


def num_elements(tensors: Iterable[TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in tensors)


def num_bytes(manifest: Manifest) -> int:
    """Bytes of the flat vector on the wire."""
    return FP32_BYTES * num_elements(manifest.tensors)


def flatten(tensors: Iterable[Tensor], *, out: Tensor | None = None) -> Tensor:
    """The tensors one after another as one fp32 vector on the CPU; ``out`` is filled and returned when given."""
    parts = [tensor.detach() for tensor in tensors]
    flat = torch.empty(sum(part.numel() for part in parts), dtype=torch.float32) if out is None else out
    pairs = zip(_views(flat, [part.shape for part in parts]), parts, strict=True)
    pinned.download(_copied([(part, view, view, part) for view, part in pairs]))
    return flat


def flatten_module(module: nn.Module, *, names: Collection[str] | None = None, out: Tensor | None = None) -> Tensor:
    """The parameters that travel as one fp32 vector in wire order."""
    return flatten(trainable(module, names=names).values(), out=out)


@torch.no_grad()
def unflatten_into(flat: Tensor, module: nn.Module, *, names: Collection[str] | None = None) -> None:
    """Set the parameters that travel from a vector in wire order."""
    parameters = list(trainable(module, names=names).values())
    pairs = zip(_views(flat, [p.shape for p in parameters]), parameters, strict=True)
    pinned.upload(_copied([(view, parameter, view, parameter) for view, parameter in pairs]))


@torch.no_grad()
def shift_module(module: nn.Module, *, base: Tensor, to: Tensor, names: Collection[str] | None = None) -> None:
    """Set each parameter l that travels to (l - ``base``) + ``to``, in one pass over the memory where l is fp32."""
    parameters = list(trainable(module, names=names).values())
    shapes = [p.shape for p in parameters]
    staged = []
    for parameter, old, new in zip(parameters, _views(base, shapes), _views(to, shapes), strict=True):
        if parameter.dtype is torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous():
            parts = (torch.split(flat.view(-1), SHIFT_BLOCK) for flat in (parameter, old, new))
            for local, before, after in zip(*parts, strict=True):
                local.sub_(before).add_(after)
        elif pinned.is_staged(old, parameter):
            staged.append((old, new, parameter))
        else:
            parameter.copy_(parameter.to("cpu", torch.float32, copy=True).sub_(old).add_(new))
    pinned.shift(staged)


def first_difference(a: Manifest, b: Manifest) -> str | None:
    """What makes two manifests differ, at the first parameter where they do; None when they agree."""
    for index, (left, right) in enumerate(zip_longest(a.tensors, b.tensors)):
        if left != right:
            return f"parameter {index} is {_describe(left)} against {_describe(right)}"
    return None


def wire_bytes(flat: Tensor) -> memoryview:
    """The bytes of a contiguous vector, fp32 or encoded (uint8), without a copy; writable."""
    assert sys.byteorder == "little", "the wire is little-endian"
    assert flat.dtype in (torch.float32, torch.uint8)
    assert flat.is_contiguous()
    array: np.ndarray[tuple[int], np.dtype[np.float32 | np.uint8]] = flat.detach().numpy()
    return array.data.cast("B")


def _copied(copies: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copy (source, target, part of the vector, parameter) where that is plain; what is left goes through `pinned`."""
    staged = []
    for source, target, vector, parameter in copies:
        if pinned.is_staged(vector, parameter):
            staged.append((vector, parameter))
        else:
            target.copy_(source)
    return staged


def _views(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    sizes = [shape.numel() for shape in shapes]
    if flat.numel() != sum(sizes):
        raise ValueError(f"vector has {flat.numel()} elements, parameters have {sum(sizes)}")
    return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def _describe(spec: TensorSpec | None) -> str:
    return f"{spec.name} {list(spec.shape)} {spec.dtype}" if spec else "absent"
