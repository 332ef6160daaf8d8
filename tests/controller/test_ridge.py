"""Discounted least squares against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from controller.ridge import Ridge, solve_positive


def test_it_agrees_with_weighted_least_squares() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 4)) * [1.0, 100.0, 0.01, 1.0]
    outcomes = features @ [1.0, 0.02, 50.0, -2.0] + rng.normal(size=400)
    ridge = Ridge([0.0] * 4, discount=0.99, pseudo_count=0.0)
    for row, outcome in zip(features, outcomes, strict=True):
        ridge.observe(row.tolist(), float(outcome))
    ridge.solve()
    root = np.sqrt(0.99 ** np.arange(399, -1, -1))
    expected = np.linalg.lstsq(features * root[:, None], outcomes * root, rcond=None)[0]
    assert ridge.weights == pytest.approx(expected.tolist(), rel=1e-6)


def test_before_it_has_seen_much_it_stays_near_where_it_began() -> None:
    ridge = Ridge([2.0, 0.0], discount=1.0, pseudo_count=50.0)
    ridge.observe([1.0, 0.0], 0.0)
    ridge.solve()
    # One observation of 0 against fifty of 2; the silent feature keeps its weight.
    assert ridge.weights == pytest.approx([2.0 * 50 / 51, 0.0])


def test_without_observations_it_predicts_by_the_prior() -> None:
    ridge = Ridge([0.5, 1.0], discount=1.0, pseudo_count=1.0)
    ridge.solve()
    assert ridge.predict([2.0, 3.0]) == 4.0


def test_the_scale_of_the_features_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    features, outcomes = rng.normal(size=(50, 3)), rng.normal(size=50)
    found = []
    for scale in (1.0, 1e4):
        ridge = Ridge([0.0] * 3, discount=0.999, pseudo_count=30.0)
        for row, outcome in zip(features * [1.0, scale, 1.0], outcomes, strict=True):
            ridge.observe(row.tolist(), float(outcome))
        ridge.solve()
        found.append(ridge.predict([1.0, scale, 1.0]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_features_that_are_the_same_share_the_weight() -> None:
    ridge = Ridge([0.0, 0.0], discount=0.9997, pseudo_count=30.0)
    for value in [0.5, 1.0, 2.0] * 1000:
        ridge.observe([value, value], 2 * value)
    ridge.solve()
    assert ridge.weights == pytest.approx([1.0, 1.0], rel=0.02)


def test_a_feature_that_fell_silent_does_not_run_away() -> None:
    ridge = Ridge([0.0, 0.0], discount=0.99, pseudo_count=1.0)
    for value in [1.0, 2.0] * 50:
        ridge.observe([value, 1.0], value)
    for _ in range(20_000):
        ridge.observe([0.0, 1.0], 0.0)
    ridge.solve()
    assert all(abs(weight) < 2 for weight in ridge.weights)


def test_solving_a_positive_definite_system() -> None:
    rng = np.random.default_rng(2)
    root = rng.normal(size=(6, 6))
    matrix, right = root @ root.T + np.eye(6), rng.normal(size=6)
    lower = [matrix[i, : i + 1].tolist() for i in range(6)]
    assert solve_positive(lower, right.tolist()) == pytest.approx(np.linalg.solve(matrix, right).tolist())
