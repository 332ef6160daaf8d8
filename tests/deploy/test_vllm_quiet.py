"""Readers of a queue sleep where they would spin; a class of another shape is left alone."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

SOURCE = ROOT / "deploy" / "local" / "vllm_quiet" / "wadiloco_vllm_quiet.py"


@pytest.fixture
def quiet() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wadiloco_vllm_quiet", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_condition() -> type[Any]:
    """Shaped as vLLM's: `wait` spins for a while after the last read, then waits for a notification."""

    class SpinCondition:
        def __init__(self, busy_loop_s: float = 1) -> None:
            self.busy_loop_s = busy_loop_s
            self.last_read = time.monotonic()
            self.waits: list[object] = []

        def wait(self, timeout_ms: int | None = None) -> None:
            spins = time.monotonic() <= self.last_read + self.busy_loop_s
            self.waits.append("spin" if spins else timeout_ms)

    return SpinCondition


def test_a_reader_sleeps_for_a_second_after_a_message_and_waits_as_before_later(
    quiet: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(quiet.time, "sleep", slept_s.append)
    condition = make_condition()
    quiet.quieten(condition)
    quiet.quieten(condition)  # vLLM calls plugins more than once
    reader = condition()
    reader.last_read += 1000
    reader.wait()
    reader.wait(60_000)
    reader.last_read -= 2000
    reader.wait(60_000)
    reader.wait()
    assert slept_s == [quiet.SHORTEST_S] * 2
    assert reader.waits == [60_000, None]


def test_a_reader_is_late_by_a_tenth_of_its_wait(quiet: ModuleType) -> None:
    assert [quiet.pause_s(waited_s) for waited_s in (0.0, 0.002, 0.009, 0.5)] == pytest.approx([5e-5, 2e-4, 9e-4, 1e-3])


def test_a_class_of_another_shape_is_left_alone(quiet: ModuleType) -> None:
    class Other:
        def __init__(self, spin: float = 1) -> None:
            self.spin = spin

        def wait(self, timeout_ms: int | None = None) -> None:
            del timeout_ms

    plain = Other.wait
    with pytest.raises(AttributeError, match="busy_loop_s"):
        quiet.quieten(Other)
    assert Other.wait is plain


def test_a_server_without_that_class_starts_all_the_same(
    quiet: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(
        sys.modules,
        "vllm.distributed.device_communicators.shm_broadcast",
        ModuleType("vllm.distributed.device_communicators.shm_broadcast"),
    )
    quiet.register()
    assert "go on spinning" in caplog.text
