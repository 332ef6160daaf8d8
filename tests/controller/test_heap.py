"""The collector works when it is due, and only where it rests otherwise."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from controller import heap
from controller import loop as decisions
from controller.clock import steady_clock
from controller.core import Controller
from controller.heap import Collections, spare_heap
from controller.leadership import SoleLeader
from controller.metrics import Metrics


class Loop:
    """What only the collector frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def lost() -> weakref.ref[Loop]:
    return weakref.ref(Loop())


def test_a_heap_that_is_spared_is_collected_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_heap()
    collections, garbage = Collections(), lost()
    collections.collect_if_due()
    assert garbage() is not None
    monkeypatch.setattr("controller.heap.COLLECT_EVERY_S", 0.0)
    collections.collect_if_due()
    assert garbage() is None


def test_many_new_containers_do_not_wait_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.heap.MOST_NEW", 1000)
    spare_heap()
    collections, garbage = Collections(), lost()
    kept: list[list[int]] = [[] for _ in range(2000)]
    collections.collect_if_due()
    assert len(kept) == 2000
    assert garbage() is None


def test_few_containers_that_hold_much_do_not_wait_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = heap._peak_bytes()
    assert size_bytes > 1 << 20
    monkeypatch.setattr(heap, "_peak_bytes", lambda: size_bytes)
    spare_heap()
    collections, garbage = Collections(), lost()
    size_bytes += heap.MOST_GROWN_BYTES - 1
    collections.collect_if_due()
    assert garbage() is not None
    size_bytes += 1
    collections.collect_if_due()
    assert garbage() is None


def test_a_standby_collects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Standby(SoleLeader):
        leads = False

    monkeypatch.setattr("controller.heap.COLLECT_EVERY_S", 0.0)
    loop = decisions.Loop(Controller(None, Metrics(), steady_clock(), leadership=Standby()))
    spare_heap()
    garbage = lost()
    asyncio.run(loop.tick())
    assert garbage() is None


def test_a_collector_that_works_by_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.heap.COLLECT_EVERY_S", 0.0)
    gc.set_threshold(1_000_000)
    garbage = lost()
    Collections().collect_if_due()
    assert garbage() is not None
