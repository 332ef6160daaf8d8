"""Whatever a researcher's code does wrong is one line with the field ``workload``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.inner import InnerConfig, InnerLoop
from diloco.workload import Shard, Workload
from diloco.workload_loading import (
    build_module,
    build_optimizer,
    count_tokens,
    fault,
    load_workload,
    open_batches,
)
from examples.own_model.spirals import Spirals
from service.errors import InputError, UnavailableError, WadilocoError

SHARD = Shard(slot=1, num_shards=4, seed=0)


class Scripted(Workload[Any]):
    """A workload that returns what it is told to."""

    def __init__(self, *, model: Any = None, batches: Any = None, tokens: Any = 1, optimizer: Any = None) -> None:
        self._model, self._batches, self._tokens, self._optimizer = model, batches, tokens, optimizer

    def build_model(self, *, seed: int) -> nn.Module:
        model: nn.Module = self._said(self._model)
        return model

    def batches(self, shard: Shard, *, position: int) -> Iterator[Any]:
        batches: Iterator[Any] = self._said(self._batches)
        return batches

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def count_tokens(self, batch: Any) -> int:
        tokens: int = self._tokens
        return tokens

    def build_optimizer(self, model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._said(self._optimizer)
        return optimizer

    @staticmethod
    def _said(value: Any) -> Any:
        return value() if callable(value) and not isinstance(value, nn.Module) else value


def fail(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


def refuses(message: str, call: Callable[[], object], kind: type[WadilocoError] = InputError) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert caught.value.field == "workload"
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # undone after the test, with what the loader appends

    def put(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return put


def test_the_factory_gets_the_options_as_strings() -> None:
    workload = load_workload("examples.own_model.spirals:make", {"width": "8", "batch_size": "4"})
    assert isinstance(workload, Spirals)
    assert build_module(workload, seed=0).get_parameter("0.weight").shape == (8, 2)


def test_a_module_in_the_working_directory_is_found(mine: Callable[[str, str], None]) -> None:
    mine("mine_c", "from examples.own_model.spirals import make")
    assert isinstance(load_workload("mine_c:make", {}), Spirals)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("import no_such_package_d", {}, "importing NAME raised ModuleNotFoundError: No module named 'no_such_pack"),
        ("raise RuntimeError('one\\ntwo')", {}, "importing NAME raised RuntimeError: one "),
        ("raise SystemExit(0)", {}, "importing NAME raised SystemExit: 0"),
        ("", {}, r"NAME \(.*NAME\.py\) has no make"),
        ("make = 7", {}, "NAME:make is of type int and cannot be called"),
        ("def make(): raise ValueError", {}, r"make\(\) raised ValueError"),
        (
            "def make(): ...",
            {"width": "3"},
            r"make\(width='3'\) raised TypeError: .*unexpected keyword argument 'width'",
        ),
        ("def make(): ...", {}, "NAME:make returned None, which is no diloco.workload.Workload"),
        (
            "from diloco.workload import Workload\nmake = Workload",
            {},
            "raised TypeError: Can't instantiate abstract class",
        ),
    ],
)
def test_what_is_wrong_with_module_and_factory(
    mine: Callable[[str, str], None], request: pytest.FixtureRequest, source: str, options: dict[str, str], message: str
) -> None:
    name = f"mine_d{abs(hash(request.node.name))}"
    mine(name, source)
    refuses(message.replace("NAME", name), lambda: load_workload(f"{name}:make", options))


def test_what_may_be_there_at_the_next_start_is_worth_another_attempt(mine: Callable[[str, str], None]) -> None:
    mine("mine_e", "def make(): open('/nowhere/points')")
    refuses(r"make\(\) raised FileNotFoundError", lambda: load_workload("mine_e:make", {}), UnavailableError)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (fail(KeyError("k")), "build_model raised KeyError: 'k'"),
        (None, "build_model returned None, not a torch.nn.Module"),
        (nn.ReLU(), "no parameters to train"),
        (frozen(nn.Linear(2, 2)), "no parameters to train"),
        (nn.ParameterList([torch.empty(0)]), "no parameters to train"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()),
            r"parameter 1\.bias is bfloat16, and only float32",
        ),
        (nn.Linear(2, 2).double(), "parameter bias is float64"),
    ],
)
def test_models_that_cannot_be_trained(model: Any, message: str) -> None:
    refuses(message, lambda: build_module(Scripted(model=model), seed=0))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_is_named() -> None:
    refuses("parameter bias has no shape yet", lambda: build_module(Scripted(model=nn.LazyLinear(3)), seed=0))


def test_frozen_parameters_may_be_of_any_type() -> None:
    module = nn.Sequential(frozen(nn.Embedding(8, 4).bfloat16()), nn.Linear(4, 1))
    assert build_module(Scripted(model=module), seed=0) is module


def test_the_layers_own_initial_values_follow_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    drawn = [build_module(Scripted(model=lambda: nn.Linear(4, 4)), seed=seed) for seed in (3, 3, 4)]
    weights = [module.get_parameter("weight") for module in drawn]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (fail(ValueError("v")), "batches raised ValueError: v"),
        ([1, 2], "batches returned a list, not an iterator"),
        (lambda: iter([]), "the batches ended at 5"),
        (lambda: iter([None]), "batch 5 is None"),
        (lambda: (1 // n for n in [0]), "batch 5 raised ZeroDivisionError"),
    ],
)
def test_batches_that_cannot_be_opened(batches: Any, message: str) -> None:
    refuses(message, lambda: open_batches(Scripted(batches=batches), SHARD, position=5))


def test_batches_that_end_later_are_told_at_their_end() -> None:
    batches = open_batches(Scripted(batches=lambda: iter("ab")), SHARD, position=5)
    assert [next(batches), next(batches)] == ["a", "b"]
    refuses("the batches ended at 7", lambda: next(batches))


@pytest.mark.parametrize("position", [0, 1, 40, 41, 100])
def test_batches_of_the_example_do_not_depend_on_where_they_were_opened(position: int) -> None:
    workload = Spirals(width=4, batch_size=8, num_samples=512)
    whole = list(islice(open_batches(workload, SHARD, position=0), 110))
    for expected, opened in zip(whole[position:], open_batches(workload, SHARD, position=position), strict=False):
        assert all(torch.equal(a, b) for a, b in zip(expected, opened, strict=True))


@pytest.mark.parametrize("tokens", [0, -1, 1.5, None, "3"])
def test_a_count_that_is_none(tokens: Any) -> None:
    refuses("count_tokens returned", lambda: count_tokens(Scripted(tokens=tokens), "batch"))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [(fail(ValueError("v")), "build_optimizer raised ValueError: v"), (None, "build_optimizer returned None")],
)
def test_an_optimizer_that_is_none(optimizer: Any, message: str) -> None:
    scripted = Scripted(optimizer=optimizer)
    refuses(message, lambda: build_optimizer(scripted, nn.Linear(1, 1), InnerConfig()))


def test_by_default_frozen_parameters_are_not_optimized() -> None:
    module = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 1))
    optimizer = build_optimizer(Spirals(width=1, batch_size=1, num_samples=1), module, InnerConfig(lr=0.25))
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in module[1].parameters()]
    assert group["lr"] == 0.25


def test_the_trace_of_a_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    refuses("the first inner step raised RuntimeError: shapes", lambda: raise_fault(RuntimeError("shapes\nand more")))
    assert "and more" in caplog.text


def raise_fault(error: Exception) -> None:
    raise fault(error, "the first inner step") from error


def test_the_example_of_the_manual_is_complete_and_learns(mine: Callable[[str, str], None]) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    mine("mine_f", manual.partition("```python\n")[2].partition("```")[0])
    workload = load_workload("mine_f:make", {"num_bits": "8"})
    module = build_module(workload, seed=0)
    config = InnerConfig(lr=1e-2)
    optimizer = build_optimizer(workload, module, config)
    inner = InnerLoop(module, config, loss=workload.loss, optimizer=optimizer)
    for batch in islice(open_batches(workload, SHARD, position=0), 400):
        assert inner.take_step(batch)
        assert count_tokens(workload, batch) == 32
    assert inner.loss is not None
    assert inner.loss < 0.3
