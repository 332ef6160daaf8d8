"""Bins of the last minutes: what is added up, what stays unknown, what is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from controller.dashboard.history import BIN_S, NUM_BINS, LoadHistory, SloCount
from sidecar.schema import LoadSample
from tests.controller.helpers import sample

T0_S = 1_700_000_000.0


def add(history: LoadHistory, t_s: float, **fields: Any) -> None:
    history.add(LoadSample.model_validate(sample(t_s=t_s, **fields)))


def test_samples_of_one_bin_are_averaged_and_counts_added_up() -> None:
    history = LoadHistory()
    add(history, T0_S, running=2, waiting=0, arrivals=3, interval_s=1.0, slo_requests=4, slo_violations=1)
    add(history, T0_S + 1, running=4, waiting=2, arrivals=1, interval_s=3.0, slo_requests=6, slo_violations=0)
    (found,) = history.bins("vllm-0")
    assert found.t_s == T0_S + BIN_S
    assert (found.in_engine, found.arrivals_per_s) == (4.0, 1.0)
    assert (found.requests, found.violations) == (10.0, 1.0)


def test_what_no_sample_told_is_unknown_and_not_zero() -> None:
    history = LoadHistory()
    add(history, T0_S, running=2, waiting=0)
    add(history, T0_S + 2 * BIN_S, arrivals=0, interval_s=1.0)
    first, second = history.bins("vllm-0")
    assert (first.in_engine, first.arrivals_per_s, first.requests) == (2.0, None, None)
    assert (second.in_engine, second.arrivals_per_s) == (None, 0.0)
    assert history.slo("vllm-0", since_s=T0_S - 60) is None
    assert history.bins("nobody") == []


def test_the_slo_counts_only_the_window() -> None:
    history = LoadHistory()
    for second in range(0, 120, 10):
        add(history, T0_S + second, slo_requests=10, slo_violations=second // 60)
    assert history.slo("vllm-0", since_s=T0_S) == SloCount(requests=120, violations=6)
    assert history.slo("vllm-0", since_s=T0_S + 60) == SloCount(requests=60, violations=6)


def test_bins_that_are_over_ten_minutes_old_are_gone_and_samples_for_them_are_left_out() -> None:
    history = LoadHistory()
    add(history, T0_S, running=1, waiting=0)
    add(history, T0_S + NUM_BINS * BIN_S, running=2, waiting=0)
    assert [found.in_engine for found in history.bins("vllm-0")] == [2.0]
    add(history, T0_S, running=9, waiting=0)
    assert [found.in_engine for found in history.bins("vllm-0")] == [2.0]
    add(history, T0_S + 100 * NUM_BINS * BIN_S, running=3, waiting=0)
    assert [found.in_engine for found in history.bins("vllm-0")] == [3.0]


def test_a_late_sample_goes_into_its_own_bin() -> None:
    history = LoadHistory()
    add(history, T0_S + 20, running=2, waiting=0)
    add(history, T0_S + 5, running=1, waiting=0)
    assert [found.in_engine for found in history.bins("vllm-0")] == [1.0, 2.0]


@pytest.mark.parametrize("kept", [set(), {"vllm-1"}])
def test_servers_that_left_are_forgotten(kept: set[str]) -> None:
    history = LoadHistory()
    for name in ("vllm-0", "vllm-1"):
        history.add(LoadSample.model_validate(sample(name, t_s=T0_S, running=1, waiting=0)))
    history.keep_only(kept)
    assert history.bins("vllm-0") == []
    assert bool(history.bins("vllm-1")) is bool(kept)
