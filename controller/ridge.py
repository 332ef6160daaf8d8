"""Discounted least squares, online: y ≈ w·x, with what is long ago forgotten (pure).

    A = Σ d^age x xᵀ      b = Σ d^age x y      n = Σ d^age
    w = w₀ + (A + (κ/n)·diag A)⁻¹ (b - A w₀)

(ridge regression, Hoerl and Kennard 1970, around w₀ instead of 0.) The ridge counts as κ observations in which each
feature alone had its usual size, so that the scale of features and outcomes does not matter. The sums are kept and not
the inverse: recursive least squares keeps the inverse, which grows without bound while a feature stays silent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SILENT = 1e-12
"""Added to the diagonal: a feature that was always 0 keeps the weight that it began with."""


class Ridge:
    """Memory and work per observation are constant; `solve` takes the cube of the number of features."""

    def __init__(self, prior: Sequence[float], *, discount: float, pseudo_count: float) -> None:
        size = len(prior)
        self.weights = list(prior)
        self.num = 0.0
        self._prior = tuple(prior)
        self._discount = discount
        self._pseudo_count = pseudo_count
        self._products = [[0.0] * (row + 1) for row in range(size)]
        """Lower triangle of A, row by row."""
        self._outcomes = [0.0] * size

    def observe(self, features: Sequence[float], outcome: float) -> None:
        discount = self._discount
        self._products = [
            [discount * known + value * other for known, other in zip(row, features, strict=False)]
            for row, value in zip(self._products, features, strict=True)
        ]
        self._outcomes = [
            discount * known + value * outcome for known, value in zip(self._outcomes, features, strict=True)
        ]
        self.num = discount * self.num + 1.0

    def predict(self, features: Sequence[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(self.weights, features, strict=True))

    def solve(self) -> None:
        """Take the observations until now into the weights."""
        if self.num == 0.0:
            return
        known, prior = self._products, self._prior
        size = len(prior)
        left = [
            outcome - math.fsum(_at(known, i, j) * prior[j] for j in range(size))
            for i, outcome in enumerate(self._outcomes)
        ]
        penalty = 1.0 + self._pseudo_count / self.num
        matrix = [list(row) for row in known]
        for i in range(size):
            matrix[i][i] = matrix[i][i] * penalty + SILENT
        self.weights = [start + step for start, step in zip(prior, solve_positive(matrix, left), strict=True)]


def solve_positive(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of A x = ``right`` for a positive definite A whose lower triangle is given (Cholesky)."""
    size = len(right)
    factor: list[list[float]] = []
    half: list[float] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            row.append((lower[i][j] - sum(map(float.__mul__, row, factor[j][:j]))) / factor[j][j])
        # Rounding may leave a direction that was never seen at or under 0; it then stays out.
        row.append(math.sqrt(max(lower[i][i] - sum(value * value for value in row), SILENT)))
        factor.append(row)
        half.append((right[i] - sum(map(float.__mul__, row, half))) / row[i])
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(factor[k][i] * found[k] for k in range(i + 1, size))
        found[i] = (half[i] - rest) / factor[i][i]
    return found


def _at(lower: Sequence[Sequence[float]], i: int, j: int) -> float:
    return lower[i][j] if j <= i else lower[j][i]
