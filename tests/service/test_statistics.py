"""The paired test and the bootstrap interval."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.statistics import EXACT_UP_TO, bootstrap_ci95, quantile, sign_flip_p_value

numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(st.lists(numbers, min_size=1, max_size=9))
def test_the_sign_flip_p_is_the_share_of_all_patterns(differences: list[float]) -> None:
    seen = abs(sum(differences))
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [abs(sum(sign * value for sign, value in zip(signs, differences, strict=True))) for signs in patterns]
    tolerance = 1e-9 * (1 + sum(map(abs, differences)))
    assert sign_flip_p_value(differences) == pytest.approx(
        sum(value >= seen - tolerance for value in sums) / len(patterns), abs=2 / len(patterns)
    )


@pytest.mark.parametrize(("n", "p"), [(1, 1.0), (4, 0.125), (5, 0.0625), (8, 2**-7), (16, 2**-15)])
def test_equal_signs_give_the_smallest_p_that_n_allows(n: int, p: float) -> None:
    assert sign_flip_p_value([-0.01 - 0.001 * index for index in range(n)]) == pytest.approx(p)


def test_no_difference_gives_one() -> None:
    assert sign_flip_p_value([0.0] * 6) == 1
    assert sign_flip_p_value([0.1, -0.1] * 3) == 1


def test_beyond_the_exact_limit_the_estimate_is_close_repeatable_and_never_zero() -> None:
    draw = random.Random(1)
    differences = [draw.gauss(0.3, 1) for _ in range(EXACT_UP_TO + 1)]
    estimate = sign_flip_p_value(differences)
    assert estimate == sign_flip_p_value(differences)
    reference = [
        abs(sum(value * draw.choice((1, -1)) for value in differences)) >= abs(sum(differences)) for _ in range(20_000)
    ]
    assert estimate == pytest.approx(statistics.mean(reference), abs=0.02)
    assert 0 < sign_flip_p_value([1.0] * 60) < 1e-4


def test_the_bootstrap_interval_holds_the_sample_mean_and_repeats() -> None:
    sample = [1.0, 2.0, 4.0, 4.5]
    low, high = bootstrap_ci95(sample)
    assert low <= statistics.mean(sample) <= high
    assert bootstrap_ci95(sample) == (low, high)
    assert bootstrap_ci95([3.0]) == (3, 3)


@pytest.mark.parametrize(("n", "coverage"), [(5, 0.84), (30, 0.93)])
def test_the_bootstrap_interval_covers_as_often_as_its_documentation_says(n: int, coverage: float) -> None:
    draw = random.Random(2)
    num_trials = 400
    covered = 0
    for trial in range(num_trials):
        low, high = bootstrap_ci95([draw.gauss(1.0, 2.0) for _ in range(n)], seed=trial)
        covered += low <= 1.0 <= high
    # Three standard deviations of a proportion of 400.
    assert covered / num_trials == pytest.approx(coverage, abs=3 * (coverage * (1 - coverage) / num_trials) ** 0.5)


def test_the_interval_of_few_values_is_that_of_all_resamples() -> None:
    sample = [0.3, -1.2, 2.0, 0.7]
    means = sorted(statistics.fmean(drawn) for drawn in itertools.product(sample, repeat=4))
    assert bootstrap_ci95(sample) == pytest.approx((quantile(means, 0.025), quantile(means, 0.975)))


def test_the_interval_of_many_values_agrees_with_the_normal_one() -> None:
    draw = random.Random(3)
    sample = [draw.gauss(2.0, 3.0) for _ in range(200)]
    spread = statistics.pstdev(sample) / 200**0.5
    low, high = bootstrap_ci95(sample)
    assert low == pytest.approx(statistics.fmean(sample) - 1.96 * spread, abs=0.2 * spread)
    assert high == pytest.approx(statistics.fmean(sample) + 1.96 * spread, abs=0.2 * spread)


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([1.0, 2.0, 4.0, 8.0], share) for share in (0, 0.25, 0.26, 0.5, 0.975, 1)] == [1, 1, 2, 2, 8, 8]
