"""How far arrivals are from Poisson: the Allan factor of their counts, online.

With N_k the arrivals of the k-th window of `WINDOW_S`

    A = Σ (N_k - N_{k-1})² / Σ (N_k + N_{k-1})

is 1 for a Poisson process of any rate, less for more regular arrivals and more for bursts (Lowen & Teich 2005,
Fractal-Based Point Processes; after Allan 1966). Differences of neighbours make it blind to a rate that drifts: an hour
of Poisson counts whose rate wanders by tens of percent has 0.9 to 1.2, on/off traffic 20 to 26, the Azure code trace
38. It is known within minutes, where errors of forecasts a minute ahead take hours to tell as much. Windows of unequal
length are compared as rates, each with the variance that it would have as Poisson.

- *before the first pair of windows* A is 1, and one arrival's worth of that stays in the sums.
- *hole*: the window under way is dropped, and windows on both sides of it are no neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW_S = 10.0
MIN_WINDOW_S = 0.98 * WINDOW_S
"""Ticks that come early by jitter do not make a window longer by one."""
DISCOUNT = 0.998
"""Per window: about the last hour and a half."""
PRIOR_ARRIVALS = 1.0


class Window(NamedTuple):
    arrivals: float
    length_s: float


class Dispersion:
    """Takes the arrivals of each interval; `allan` is the factor."""

    __slots__ = ("_arrivals", "_before", "_length_s", "arrivals", "squares")

    def __init__(self, *, squares: float = 0.0, arrivals: float = 0.0) -> None:
        self.squares = squares
        self.arrivals = arrivals
        """The two sums, discounted."""
        self.restart()

    @property
    def allan(self) -> float:
        return (self.squares + PRIOR_ARRIVALS) / (self.arrivals + PRIOR_ARRIVALS)

    def restart(self) -> None:
        """What comes next does not join what came last."""
        self._arrivals = self._length_s = 0.0
        self._before: Window | None = None

    def add(self, arrivals: float, *, interval_s: float) -> bool:
        """``arrivals`` came in the next ``interval_s``; True when `allan` has changed."""
        self._arrivals += arrivals
        self._length_s += interval_s
        if self._length_s < MIN_WINDOW_S:
            return False
        before, window = self._before, Window(self._arrivals, self._length_s)
        self._before, self._arrivals, self._length_s = window, 0.0, 0.0
        if before is None:
            return False
        self._compare(before, window)
        return True

    def _compare(self, before: Window, window: Window) -> None:
        # In units of arrivals per window of their mean length.
        to_before, to_window = (0.5 * (before.length_s + window.length_s) / w.length_s for w in (before, window))
        off = to_window * window.arrivals - to_before * before.arrivals
        variance = to_window * to_window * window.arrivals + to_before * to_before * before.arrivals
        self.squares = DISCOUNT * self.squares + off * off
        self.arrivals = DISCOUNT * self.arrivals + variance
