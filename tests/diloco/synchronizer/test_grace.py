"""How long a round waits for stragglers, and for whom."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.grace import (
    LIVE_ROUNDS,
    NORMAL_SPREAD,
    ROUNDS_KEPT,
    SPREADS,
    Arrivals,
    grace_s,
    lateness_s,
    live_slots,
    remember,
)

LIMITS = {"floor_s": 0.0, "ceiling_s": 60.0}


def arrivals(*offsets_s: float, round_number: int = 0) -> Arrivals:
    return Arrivals(round=round_number, offsets_s=dict(enumerate(offsets_s)))


def rounds(*each: tuple[float, ...]) -> tuple[Arrivals, ...]:
    return tuple(arrivals(*offsets_s, round_number=number) for number, offsets_s in enumerate(each))


def test_lateness_counts_from_the_quorum_and_spares_those_within_it() -> None:
    history = rounds((0.0, 1.0, 5.0), (0.0, 2.0), (0.0, 0.5, 2.5))
    assert lateness_s(history, 2) == [4.0, 2.0]
    assert lateness_s(history, 1) == [1.0, 5.0, 2.0, 0.5, 2.5]
    assert lateness_s(history, 3) == []


def test_the_order_of_slots_says_nothing() -> None:
    assert lateness_s(rounds((5.0, 0.0, 1.0)), 2) == [4.0]


def test_grace_is_the_median_and_three_spreads() -> None:
    late_s = [1.0, 2.0, 3.0, 4.0, 10.0]
    history = rounds(*((0.0, late) for late in late_s))
    spread_s = statistics.median(abs(value - 3.0) for value in late_s)
    assert grace_s(history, 1, **LIMITS) == pytest.approx(3.0 + SPREADS * NORMAL_SPREAD * spread_s)


@pytest.mark.parametrize(("late", "floor_s", "ceiling_s", "expected"), [(0.0, 0.5, 9, 0.5), (100.0, 0, 9, 9.0)])
def test_grace_stays_within_its_limits(late: float, floor_s: float, ceiling_s: float, expected: float) -> None:
    assert grace_s(rounds((0.0, late)), 1, floor_s=floor_s, ceiling_s=ceiling_s) == expected


def test_while_nobody_was_late_the_longest_grace_shows_who_is() -> None:
    assert grace_s((), 2, floor_s=0.1, ceiling_s=7.0) == 7.0
    assert grace_s(rounds((0.0, 1.0)), 2, floor_s=0.1, ceiling_s=7.0) == 7.0


def test_one_island_that_hung_does_not_stretch_the_rounds_after_it() -> None:
    usual = rounds(*((0.0, 1.0 + 0.1 * number) for number in range(8)))
    before_s = grace_s(usual, 1, **LIMITS)
    after_s = grace_s(remember(usual, arrivals(0.0, 50.0, round_number=8)), 1, **LIMITS)
    assert after_s < before_s + 0.5


def test_an_arrival_after_the_close_is_learned_once() -> None:
    late = arrivals(0.0).with_late(7, 3.0).with_late(7, 9.0)
    assert late.offsets_s == {0: 0.0, 7: 3.0}
    assert lateness_s((late,), 1) == [3.0]


def test_the_last_rounds_are_kept_and_a_newer_word_on_the_last_replaces_it() -> None:
    history: tuple[Arrivals, ...] = ()
    for number in range(ROUNDS_KEPT + 5):
        history = remember(history, arrivals(0.0, round_number=number))
    assert [known.round for known in history] == list(range(5, ROUNDS_KEPT + 5))
    last = history[-1].with_late(3, 1.0)
    assert remember(history, last)[-1] == last
    assert len(remember(history, last)) == ROUNDS_KEPT


def test_a_synchronizer_that_went_back_forgets_the_rounds_that_are_void() -> None:
    history = rounds((0.0,), (0.0,), (0.0,))
    assert [known.round for known in remember(history, arrivals(0.0, 1.0, round_number=1))] == [0, 1]


def test_slots_that_contributed_lately_live() -> None:
    history = tuple(Arrivals(round=number, offsets_s={number: 0.0, 9: 1.0}) for number in range(6))
    assert live_slots(history) == {9, *range(6 - LIVE_ROUNDS, 6)}
    assert live_slots(()) == frozenset()


offsets = st.lists(st.floats(0, 1e5), min_size=1, max_size=8)


@given(
    st.lists(offsets, max_size=10),
    st.integers(1, 9),
    st.floats(0, 100),
    st.floats(0, 1000),
)
def test_grace_is_always_within_its_limits(each: list[list[float]], quorum: int, floor_s: float, more_s: float) -> None:
    history = rounds(*(tuple(one) for one in each))
    assert floor_s <= grace_s(history, quorum, floor_s=floor_s, ceiling_s=floor_s + more_s) <= floor_s + more_s


def test_limits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"grace_min_s 2 is over grace_max_s 1"):
        SynchronizerSettings(directory=tmp_path, grace_min_s=2.0, grace_max_s=1.0)
