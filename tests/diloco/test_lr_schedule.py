from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.lr_schedule import LrSchedule, lr_share


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (10_000, 1.0)])
def test_the_learning_rate_rises_linearly_to_its_peak(step: int, expected: float) -> None:
    assert lr_share(step, LrSchedule(warmup_steps=10)) == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    assert lr_share(0, LrSchedule(warmup_steps=0)) == 1.0


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("linear", 9, 1.0),
        ("linear", 59, 0.55),
        ("linear", 109, 0.1),
        ("linear", 5000, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 34, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 59, 0.55),
        ("cosine", 109, 0.1),
        ("cosine", 5000, 0.1),
    ],
)
def test_the_decay_goes_from_the_end_of_the_warm_up_to_the_floor(name: Any, step: int, expected: float) -> None:
    schedule = LrSchedule(name=name, warmup_steps=10, decay_steps=110, floor=0.1)
    assert lr_share(step, schedule) == pytest.approx(expected)


@given(
    name=st.sampled_from(["cosine", "linear"]),
    warmup=st.integers(0, 50),
    span=st.integers(1, 500),
    floor=st.floats(0, 1),
)
def test_a_decay_never_rises_and_never_leaves_its_bounds(name: Any, warmup: int, span: int, floor: float) -> None:
    schedule = LrSchedule(name=name, warmup_steps=warmup, decay_steps=warmup + span, floor=floor)
    rates = [lr_share(step, schedule) for step in range(warmup, warmup + span + 5)]
    assert all(floor - 1e-12 <= later <= earlier + 1e-12 for earlier, later in pairwise(rates))
    assert rates[-1] == pytest.approx(floor)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cosine"}, "lr_schedule cosine needs decay_steps"),
        ({"name": "linear", "decay_steps": 50}, "decay_steps 50 must be above warmup_steps 50"),
        ({"decay_steps": 100}, "decay_steps is for a schedule that decays"),
        ({"name": "linear", "decay_steps": 100, "floor": 1.5}, "min_lr"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LrSchedule(**settings)
