"""What a snapshot holds of an optimizer and the generators comes back bit for bit; what it cannot hold is refused."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco.vault.contents import HotState, restore_random
from diloco.vault.errors import CorruptError, VaultError
from diloco.vault.part import PartReader, PartWriter, table_of
from diloco.vault.tree import pack, unpack

LEAVES = st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(tree=TREES)
def test_any_tree_comes_back_with_its_types(tree: Any) -> None:
    def holds(value: Any) -> bool:
        if isinstance(value, dict):
            keys_fit = all(not (isinstance(key, str) and key.startswith("$")) for key in value)
            return keys_fit and all(map(holds, value.values()))
        return all(map(holds, value)) if isinstance(value, list | tuple) else True

    if holds(tree):
        assert same(unpack(pack(tree, "x", {}), {}), tree)


def test_what_is_no_state_is_refused_by_its_name() -> None:
    with pytest.raises(VaultError, match="optimizer/3/f is of type function"):
        pack({3: {"f": lambda: None}}, "optimizer", {})
    with pytest.raises(CorruptError):
        unpack({"$t": "nowhere"}, {})


def written(hot: HotState) -> PartReader:
    captured = hot.capture()
    table = table_of(captured.tensors, captured.state)
    region = memoryview(bytearray(table.num_bytes))
    writer = PartWriter(region, table)
    for name, tensor in captured.early.items():
        writer.put(name, tensor)
    assert writer.finish(captured.late).length == table.num_bytes
    return PartReader(region)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    first = nn.Linear(3, 5)
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())  # not contiguous
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[torch.Tensor]:
    for _ in range(count):
        optimizer.zero_grad()
        batch = torch.randn(4, 3) + random.random() + float(np.random.rand())
        module(batch).square().mean().backward()
        optimizer.step()
    return [tensor.clone() for tensor in module.state_dict().values()]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=list(OPTIMIZERS))
def test_another_module_and_optimizer_go_on_as_the_first_would_have(kind: str) -> None:
    first = model(0)
    optimizer = OPTIMIZERS[kind](first.parameters())
    steps(first, optimizer, 3)
    part = written(HotState(first, optimizer))
    wanted = steps(first, optimizer, 4)
    second = model(1)
    other = OPTIMIZERS[kind](second.parameters())
    steps(second, other, 1)
    restored = HotState(second, other)
    restored.restore(part)
    restore_random(part)
    assert all(map(torch.equal, steps(second, other, 4), wanted))


def test_restoring_takes_the_vaults_values_and_not_its_memory(tmp_path: Path) -> None:
    module = model(0)
    optimizer = torch.optim.AdamW(module.parameters())
    steps(module, optimizer, 1)
    hot = HotState(module, optimizer)
    captured = hot.capture()
    table = table_of(captured.tensors, captured.state)
    region = bytearray(table.num_bytes)
    writer = PartWriter(memoryview(region), table)
    writer.finish(captured.tensors)
    hot.restore(PartReader(memoryview(region)))
    before = [p.clone() for p in module.parameters()] + [
        t.clone() for state in optimizer.state.values() for t in state.values()
    ]
    region[:] = bytes(len(region))
    after = [*module.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    assert all(map(torch.equal, before, after))
