"""Which device a rank takes, what is moved there, and how far the host runs ahead of it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from diloco.device import MEASURE_ON_GPU_S, CatchUp, NormDue, choose_device, cuda_index, moved
from service.errors import ConfigError

META = torch.device("meta")
"""Has no data, but tensors can be moved to it."""


@pytest.mark.parametrize(
    ("choice", "count", "num_ranks", "indices"),
    [("auto", 1, 1, [0]), ("cuda", 2, 2, [0, 1]), ("cuda:1", 4, 2, [1, 2]), ("cuda:3", 4, 1, [3])],
)
def test_ranks_take_devices_that_follow_one_another(
    choice: str, count: int, num_ranks: int, indices: list[int]
) -> None:
    found = [cuda_index(choice, count=count, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert found == indices


@pytest.mark.parametrize(
    ("choice", "count", "num_ranks", "message"),
    [
        ("cuda", 0, 1, "device: cuda: torch sees no CUDA device here"),
        ("cuda:2", 2, 1, "device: cuda:2: device 2 are wanted, there are 2 CUDA devices"),
        ("cuda:1", 2, 2, "device: cuda:1: 2 ranks from 1 on are wanted, there are 2"),
        ("auto", 1, 2, "device: auto: 2 ranks from 0 on are wanted, there are 1"),
    ],
)
def test_too_few_devices_are_told_by_name(choice: str, count: int, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cuda_index(choice, count=count, rank=0, num_ranks=num_ranks)


def test_the_cpu_is_there_for_any_number_of_ranks() -> None:
    assert choose_device("cpu", rank=3, num_ranks=4) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_auto_is_the_cpu_where_torch_sees_no_gpu() -> None:
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device: cuda: torch sees no CUDA device here \(give cpu or auto"):
        choose_device("cuda")


Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Example:
    tokens: Tensor
    name: str


class Own:
    """A batch of a kind that torch does not know."""

    def __init__(self, place: object = "here") -> None:
        self.place = place

    def to(self, device: torch.device) -> Own:
        return Own(device)


def test_tensors_are_moved_wherever_a_batch_has_them() -> None:
    one = torch.zeros(2)
    assert moved(one, META).device == META
    assert [each.device for each in moved([one, one], META)] == [META] * 2
    assert isinstance(moved((one,), META), tuple)
    pair = moved(Pair(one, 3), META)
    assert (pair.first.device, pair.second) == (META, 3)
    assert moved({"x": {"y": one}}, META)["x"]["y"].device == META
    example = moved(Example(one, "a"), META)
    assert (example.tokens.device, example.name) == (META, "a")
    assert moved(Own(), META).place == META
    assert moved("text", META) == "text"
    batch = {"x": one}
    assert moved(batch, torch.device("cpu")) is batch


def test_the_host_waits_for_what_was_given_before_the_last_call() -> None:
    done: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.number = sum(each.startswith("record") for each in done)

        def record(self) -> None:
            done.append(f"record {self.number}")

        def synchronize(self) -> None:
            done.append(f"wait {self.number}")

    catch_up = CatchUp(Event)
    for _ in range(3):
        catch_up()
    assert done == ["record 0", "record 1", "wait 0", "record 2", "wait 1"]


def test_norms_are_always_due_on_a_cpu_and_now_and_then_on_a_gpu() -> None:
    on_cpu, on_gpu = NormDue(torch.device("cpu")), NormDue(torch.device("cuda"))
    times = [0.0, 0.5, MEASURE_ON_GPU_S - 0.1, MEASURE_ON_GPU_S, MEASURE_ON_GPU_S + 1]
    assert [on_cpu.take(now_s) for now_s in times] == [True] * 5
    assert [on_gpu.take(now_s) for now_s in times] == [True, False, False, True, False]
