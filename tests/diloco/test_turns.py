"""Rounds of the run, and the fragments that they sync."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.fragments import fragments_due
from diloco.turns import Place, next_round, place_of, round_of

NUM_FRAGMENTS = st.integers(1, 64)


@given(round_number=st.integers(0, 10**12), num_fragments=NUM_FRAGMENTS)
def test_a_round_and_a_fragment_with_its_version_say_the_same(round_number: int, num_fragments: int) -> None:
    place = place_of(round_number, num_fragments)
    assert round_of(place, num_fragments) == round_number
    assert (place.fragment,) == fragments_due(round_number, num_fragments)


@given(num_rounds=st.integers(0, 500), num_fragments=NUM_FRAGMENTS)
def test_in_turn_the_next_round_is_the_number_of_those_that_have_been(num_rounds: int, num_fragments: int) -> None:
    versions = [0] * num_fragments
    for number in range(num_rounds):
        assert next_round(versions) == number
        versions[place_of(number, num_fragments).fragment] += 1
    assert next_round(versions) == num_rounds


@given(versions=st.lists(st.integers(0, 50), min_size=1, max_size=16))
def test_whatever_the_versions_are_all_rounds_before_the_next_one_have_been(versions: list[int]) -> None:
    num_fragments = len(versions)
    number = next_round(versions)
    due = place_of(number, num_fragments)
    assert versions[due.fragment] == due.version
    assert all(
        versions[place.fragment] > place.version for place in (place_of(r, num_fragments) for r in range(number))
    )


def test_one_fragment_counts_as_the_run_does() -> None:
    assert place_of(7, 1) == Place(0, 7)
    assert next_round([7]) == 7
