"""Fragments are runs of whole tensors, as even as they can be."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.partition import cut, first_cut_difference, joined
from diloco.schema import Manifest, TensorSpec
from service.errors import InputError

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=40)


def manifest(*shapes: tuple[int, ...]) -> Manifest:
    return Manifest(
        tensors=tuple(TensorSpec(name=f"w{i:03d}", shape=shape, dtype="float32") for i, shape in enumerate(shapes))
    )


def sizes_of(whole: Manifest) -> list[int]:
    return [prod(spec.shape) for spec in whole.tensors]


def most_fragments(whole: Manifest) -> int:
    return sum(size > 0 for size in sizes_of(whole))


@given(shapes=SHAPES, data=st.data())
def test_every_tensor_is_in_one_fragment_in_wire_order(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    whole = manifest(*shapes)
    most = most_fragments(whole)
    if most == 0:
        return
    fragments = cut(whole, data.draw(st.integers(1, most)))
    assert joined(fragments) == whole
    assert all(sum(sizes_of(fragment)) > 0 for fragment in fragments)


@given(shapes=SHAPES, data=st.data())
def test_no_fragment_is_over_an_even_share_and_the_largest_tensor(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    whole = manifest(*shapes)
    most = most_fragments(whole)
    if most == 0:
        return
    number = data.draw(st.integers(1, most))
    fragments = cut(whole, number)
    assert len(fragments) == number
    sizes = sizes_of(whole)
    assert max(sum(sizes_of(fragment)) for fragment in fragments) <= sum(sizes) / number + max(sizes)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_other_cut_has_a_smaller_largest_fragment(sizes: list[int], data: st.DataObject) -> None:
    whole = manifest(*((size,) for size in sizes))
    if most_fragments(whole) == 0:
        return
    number = data.draw(st.integers(1, most_fragments(whole)))
    largest = max(sum(sizes_of(fragment)) for fragment in cut(whole, number))
    ends = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), number - 1))
    best = min(max(sum(sizes[a:b]) for a, b in pairwise(end)) for end in ends)
    assert largest == best


def test_one_fragment_is_the_model_itself() -> None:
    whole = manifest((4, 4), (), (0,))
    assert cut(whole, 1) == (whole,)


def test_equal_layers_are_shared_out_evenly() -> None:
    fragments = cut(manifest(*[(8, 8)] * 12), 3)
    assert [len(fragment.tensors) for fragment in fragments] == [4, 4, 4]


@pytest.mark.parametrize("number", [0, 3, 1000])
def test_a_number_of_fragments_that_the_model_does_not_have_is_refused(number: int) -> None:
    with pytest.raises(InputError, match="2 tensors") as caught:
        cut(manifest((3,), (0, 7), (2, 2)), number)
    assert caught.value.field == "num_fragments"
    assert caught.value.remedy == "give --num-fragments from 1 to 2"


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ((2, 2), None),
        ((4,), "it has 1 fragment against 2 here"),
        ((1, 3), "fragment 0 has 1 tensor against 2 here"),
        ((1, 1, 2), "it has 3 fragments against 2 here"),
    ],
)
def test_the_first_difference_between_partitions_is_named(theirs: tuple[int, ...], difference: str | None) -> None:
    assert first_cut_difference(cut(manifest(*[(2,)] * 4), 2), theirs) == difference
