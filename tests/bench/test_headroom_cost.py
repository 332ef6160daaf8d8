"""What the headroom of half an hour costs: processor time of its thread, beside which the ticks go on."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from controller.headroom import MAX_SYNCS, Conduct, Window, assess

pytestmark = pytest.mark.bench

WINDOW_S = 1800


def median_ms(num_syncs: int, num_policies: int) -> float:
    rng = random.Random(0)
    costs = tuple((2.0 if second % 60 < 20 else 0.1) * rng.random() for second in range(WINDOW_S))
    spacing = (WINDOW_S - 100) // num_syncs
    conducts = tuple(
        Conduct(
            policy=f"policy {number}",
            shadow=number > 0,
            since_s=0.0,
            starts_s=tuple(float(number + spacing * sync) for sync in range(num_syncs)),
        )
        for number in range(num_policies)
    )
    window = Window(
        since_s=0.0,
        costs_per_s=costs,
        syncs_per_s=num_syncs / WINDOW_S,
        min_gap_s=10,
        sync_s=3.5,
        conducts=conducts,
    )
    took_s = []
    for _ in range(9):
        started_s = time.thread_time()
        assess(window)
        took_s.append(time.thread_time() - started_s)
    return statistics.median(took_s) * 1e3


def test_half_an_hour_costs_milliseconds() -> None:
    usual, most = median_ms(8, 1), median_ms(MAX_SYNCS, 5)
    print(f"\n8 syncs, one policy: {usual:.1f} ms; {MAX_SYNCS} syncs, five policies: {most:.1f} ms")
    assert usual < 20
    assert most < 250
