"""Whose turn it is among the fragments."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from controller.fragments import fragments_due


def test_the_whole_model_is_due_in_every_round() -> None:
    assert [fragments_due(number, 1) for number in range(3)] == [(0,), (0,), (0,)]


@given(num_fragments=st.integers(1, 64), first=st.integers(0, 10**9))
def test_every_fragment_has_one_turn_in_as_many_rounds_as_there_are_fragments(num_fragments: int, first: int) -> None:
    due = (fragments_due(number, num_fragments) for number in range(first, first + num_fragments))
    turns = [fragment for fragments in due for fragment in fragments]
    assert sorted(turns) == list(range(num_fragments))


@given(num_fragments=st.integers(1, 64), rounds=st.integers(1, 1000))
def test_turns_are_evenly_apart(num_fragments: int, rounds: int) -> None:
    mine = [number for number in range(rounds) if fragments_due(number, num_fragments) == (0,)]
    assert {later - earlier for earlier, later in pairwise(mine)} <= {num_fragments}
