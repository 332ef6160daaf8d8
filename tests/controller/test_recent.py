"""A window in order of size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.recent import SortedWindow


@given(values=st.lists(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-1e6, 1e6), max_size=60), size=st.integers(1, 20))
def test_it_holds_the_last_values_in_order(values: list[float], size: int) -> None:
    window = SortedWindow(size)
    for number, value in enumerate(values, start=1):
        window.push(value)
        assert list(window.ascending()) == sorted(values[max(0, number - size) : number])
        assert len(window) == min(number, size)


def test_what_was_read_does_not_change_any_more() -> None:
    window = SortedWindow(3)
    for value in (3.0, 1.0, 2.0):
        window.push(value)
    before = window.ascending()
    assert window.ascending() is before
    window.push(9.0)
    assert (list(before), list(window.ascending())) == ([1.0, 2.0, 3.0], [1.0, 2.0, 9.0])
