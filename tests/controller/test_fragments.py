"""Whose turn it is among the fragments."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.fragments import FragmentSchedule


def test_the_whole_model_is_due_in_every_round() -> None:
    schedule = FragmentSchedule(num_fragments=1)
    assert [schedule.due(number) for number in range(3)] == [(0,), (0,), (0,)]
    assert schedule.steps_between(512) == 512


@given(num_fragments=st.integers(1, 64), first=st.integers(0, 10**9))
def test_every_fragment_has_one_turn_in_as_many_rounds_as_there_are_fragments(num_fragments: int, first: int) -> None:
    schedule = FragmentSchedule(num_fragments=num_fragments)
    turns = [fragment for number in range(first, first + num_fragments) for fragment in schedule.due(number)]
    assert sorted(turns) == list(range(num_fragments))


@given(num_fragments=st.integers(1, 64), rounds=st.integers(1, 1000))
def test_turns_are_evenly_apart(num_fragments: int, rounds: int) -> None:
    schedule = FragmentSchedule(num_fragments=num_fragments)
    mine = [number for number in range(rounds) if schedule.due(number) == (0,)]
    assert {later - earlier for earlier, later in pairwise(mine)} <= {num_fragments}


@pytest.mark.parametrize(("h", "num_fragments", "steps"), [(512, 4, 128), (100, 8, 13), (3, 8, 1)])
def test_a_fragment_comes_around_once_in_h_steps(h: int, num_fragments: int, steps: int) -> None:
    between = FragmentSchedule(num_fragments=num_fragments).steps_between(h)
    assert between == steps
    assert h <= between * num_fragments < h + num_fragments
