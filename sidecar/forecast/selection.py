"""Choose a smoothing model online: all of a small grid run side by side, the one with the least error predicts.

The error of a model is the discounted sum of its squared one-step errors, ``S' = d·S + e²`` with d = `DISCOUNT`: about
the last hundred steps count, so that the choice follows a change of the traffic. Ties go to the earlier in the grid,
simple before Holt.
"""

from __future__ import annotations

from sidecar.forecast.smoothing import Level, Smoothing, update

ALPHAS = (0.2, 0.05, 0.1, 0.4, 0.8)
"""0.2 leads because ties go to the first: it is what predicts before any model has proved better."""
HOLT_ALPHAS = (0.1, 0.2, 0.4, 0.8)
HOLT_BETAS = (0.02, 0.1, 0.3)
GRID = (
    *(Smoothing(alpha) for alpha in ALPHAS),
    *(Smoothing(alpha, beta) for alpha in HOLT_ALPHAS for beta in HOLT_BETAS),
)
DISCOUNT = 0.99


class Selection:
    """The grid on one series."""

    def __init__(self, grid: tuple[Smoothing, ...] = GRID) -> None:
        self._grid = grid
        self._states: list[Level] = []
        self._errors = [0.0] * len(grid)
        self._best = 0

    @property
    def model(self) -> Smoothing:
        return self._grid[self._best]

    @property
    def state(self) -> Level:
        """State of the best model. At least one value must have been observed."""
        return self._states[self._best]

    def observe(self, value: float, *, num_ticks: float) -> None:
        """One more value, ``num_ticks`` after the last."""
        if not self._states:
            self.restart(value)
            return
        for i, model in enumerate(self._grid):
            error = value - self._states[i].after(num_ticks)
            self._errors[i] = DISCOUNT * self._errors[i] + error * error
            self._states[i] = update(model, self._states[i], value, num_ticks=num_ticks)
        self._best = min(range(len(self._grid)), key=self._errors.__getitem__)

    def restart(self, value: float) -> None:
        """Begin anew at ``value``, keeping what is known about the models' errors."""
        self._states = [Level(value)] * len(self._grid)
