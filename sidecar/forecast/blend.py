"""Blend the forecasts of several models for one target, online: the weights are learned from what they got wrong.

With m the running mean of the outcomes y and x_i the forecast of model i, each forecast is drawn towards the mean by
its own slope, and the blend is

    f = Σ w_i · (m + b_i·(x_i - m))      b_i = clip(Σ(x_i-m)(y-m) / Σ(x_i-m)², 0, 1), drawn to 1 by `PRIOR_OUTCOMES`
    w_i ∝ exp(-`SHARPNESS`·n/2 · log R_i) · exp(-penalty_i)      R_i = Σ(y - m - b_i·(x_i - m))²

which is the likelihood of Gaussian errors of unknown spread, sharpened (Bates & Granger 1969; Hoeting et al. 1999 for
model averaging). Sums are discounted, n counts outcomes that do not overlap. Two reasons:

- Without the slope, squared error prefers the slowest smoothing on traffic that returns to its mean (0.02 instead of
  0.4 for 15 s ahead on on/off traffic: area under the burst curve 0.51 instead of 0.71). With it, models compete by
  how well they correlate with what comes.
- The penalties favour the smoother model: on near-Poisson traffic the evidence for it is weak and comes late, on
  bursts the evidence against it is strong and comes at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

SHARPNESS = 1.5
PRIOR_OUTCOMES = 10.0
NEW_MODEL_FADE = 0.1
# The weights of a well-known target hardly move with one outcome, and cost as much as twenty of them.
WEIGH_EVERY = 8
EAGER_OUTCOMES = 40


class Blend:
    """Weights of ``len(penalties)`` models for one target."""

    __slots__ = (
        "_discount",
        "_num_learned",
        "_offset",
        "_overlap",
        "_own_means",
        "_scales",
        "_shift",
        "best",
        "mean",
        "means",
        "num",
        "penalties",
        "sxx",
        "sxy",
        "syy",
        "weights",
    )

    def __init__(self, penalties: Sequence[float], *, discount: float, overlap: float, own_means: bool = False) -> None:
        """``overlap``: how many outcomes in a row share most of what they are made of.

        ``own_means``: forecasts are compared about their own means and not that of the outcomes, so that a bias does
        not count against a model; for `average` alone.
        """
        self.penalties = list(penalties)
        """Of each model, in nats; they may change while the list keeps its length."""
        self._discount = discount
        self._overlap = overlap
        self._own_means = own_means
        self._num_learned = 0
        self.means = [0.0] * len(penalties)
        """Running means of the forecasts, with ``own_means``."""
        self.num = 0.0
        self.mean = 0.0
        self.syy = 0.0
        self.sxx = [0.0] * len(penalties)
        self.sxy = [0.0] * len(penalties)
        self._weigh()

    def combine(self, forecasts: Sequence[float]) -> float:
        """The blended forecast."""
        blended: float = self._offset + sum(map(mul, self._scales, forecasts))
        return blended

    def average(self, forecasts: Sequence[float]) -> float:
        """The blend without the slopes; forecasts with means of their own are moved to that of the first."""
        blended: float = self._shift + sum(map(mul, self.weights, forecasts))
        return blended

    def learn(self, forecasts: Sequence[float], outcome: float) -> None:
        """``outcome`` is what the ``forecasts`` were about."""
        discount = self._discount
        self.num = discount * self.num + 1.0
        self.mean += (outcome - self.mean) / self.num
        mean = self.mean
        error = outcome - mean
        self.syy = discount * self.syy + error * error
        if self._own_means:
            share = 1.0 / self.num
            self.means = [m + share * (x - m) for m, x in zip(self.means, forecasts, strict=True)]
            off = [x - m for m, x in zip(self.means, forecasts, strict=True)]
        else:
            off = [x - mean for x in forecasts]
        self.sxx = [discount * s + x * x for s, x in zip(self.sxx, off, strict=True)]
        self.sxy = [discount * s + x * error for s, x in zip(self.sxy, off, strict=True)]
        self._num_learned += 1
        if self._num_learned <= EAGER_OUTCOMES or self._num_learned % WEIGH_EVERY == 0:
            self._weigh()

    def resize(self, penalties: Sequence[float]) -> None:
        """Other models at the end of the list.

        A new one begins with the record of the best, to be proved or not; all records fade, so that what it does soon
        outweighs what it never did.
        """
        num_new, best = len(penalties) - len(self.penalties), self.best
        if num_new > 0:
            self._fade(NEW_MODEL_FADE)
        self.penalties = list(penalties)
        self.sxx = self.sxx[: len(penalties)] + [self.sxx[best]] * num_new
        self.sxy = self.sxy[: len(penalties)] + [self.sxy[best]] * num_new
        self.means = self.means[: len(penalties)] + [self.means[best]] * num_new
        self._weigh()

    def _fade(self, factor: float) -> None:
        self.num *= factor
        self.syy *= factor
        self.sxx = [factor * value for value in self.sxx]
        self.sxy = [factor * value for value in self.sxy]

    def load(
        self,
        *,
        num: float,
        mean: float,
        syy: float,
        sxx: Sequence[float],
        sxy: Sequence[float],
        means: Sequence[float],
    ) -> None:
        """Take over sums that were kept."""
        self.num, self.mean, self.syy = num, mean, syy
        self.sxx, self.sxy, self.means = list(sxx), list(sxy), list(means)
        self._num_learned = EAGER_OUTCOMES if num >= EAGER_OUTCOMES else int(num)
        self._weigh()

    def _weigh(self) -> None:
        syy = self.syy
        # With no variance (nothing learned, or a constant series) every slope is 1.
        prior = PRIOR_OUTCOMES * syy / self.num + 1e-9 if self.num else 1.0
        floor = 1e-9 * syy + 1e-12
        evidence = -0.5 * SHARPNESS * self.num / self._overlap
        slopes, scores = [], []
        for sxx, sxy, penalty in zip(self.sxx, self.sxy, self.penalties, strict=True):
            slope = (sxy + prior) / (sxx + prior)
            slope = 0.0 if slope < 0.0 else 1.0 if slope > 1.0 else slope
            slopes.append(slope)
            left = syy - slope * (2.0 * sxy - slope * sxx)
            scores.append(evidence * math.log(left if left > floor else floor) - penalty)
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self._scales: list[float] = list(map(mul, self.weights, slopes))
        self._offset = self.mean * (1.0 - sum(self._scales))
        self._shift = self.means[0] - math.fsum(map(mul, self.weights, self.means))
        self.best = scores.index(top)
