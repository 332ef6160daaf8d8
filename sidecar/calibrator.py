"""How probable an SLO violation is at a given load and phase of training, learned online (pure).

Loads (requests in the engine) are counted in bins; each (phase, bin) has a request count n and violations v, fading
with `HALF_LIFE` further observations of its phase. The estimate is the mean of a Beta posterior

    p = (v + κ·π) / (n + κ)        κ = `PRIOR_REQUESTS`

drawn to a prior π that is itself learned: for phase ``none`` the phase's overall rate, for ``inner`` and ``sync`` the
estimate of ``none`` in that bin plus the phase's overall excess over it, which is `PRIOR_EXCESS` before it was seen:
what is unknown counts as harmful. More load never makes a violation less probable: pool-adjacent-violators (Ayer et al.
1955) makes each phase monotone, weighted by n, so that a bin without data goes along with its neighbours. The interval
is Wilson's (1927) at 90 % for the pooled n + κ requests: unlike the normal one it holds where violations are rare.

The cost of a sync that starts s seconds from now and lasts d is

    cost(s) = λ(s)·d · max(p(load(s), sync) - p(load(s), none), 0)

expected extra violations, with arrivals λ and load from the forecast of the horizon s.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from sidecar.forecast.state import Document

LOAD_EDGES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0)
"""Bin i holds the loads from edge i-1 up to under edge i: an idle engine has a bin of its own."""
BINS: tuple[tuple[float, float | None], ...] = tuple(zip((0.0, *LOAD_EDGES), (*LOAD_EDGES, None), strict=True))
"""From and below of each bin; the last one has no upper end."""
NUM_BINS = len(BINS)
PRIOR_REQUESTS = 20.0
"""So many requests in a bin weigh as much as the prior."""
PRIOR_VIOLATIONS, PRIOR_OVERALL = 0.5, 10.0
"""Before anything is known: 5 % of the requests violate the objective."""
PRIOR_EXCESS = {"inner": 0.05, "sync": 0.2}
NO_DATA = 1e-3
"""Weight of a bin without requests when neighbours are pooled."""
HALF_LIFE = 50_000.0
"""Requests after which an observation counts half."""
NORMAL_Q95 = 1.645


class Phase(StrEnum):
    """What the trainer beside the server does while a request is served."""

    NONE = "none"
    INNER = "inner"
    SYNC = "sync"


class Estimate(NamedTuple):
    """P(violation) in one bin of one phase."""

    probability: float
    low: float
    high: float
    requests: float
    """Faded count that was observed in this bin itself; 0 when all is borrowed."""


class SyncCost(NamedTuple):
    start_s: float
    violations: float
    """Expected extra violations of a sync that starts then."""


class CalibratorState(Document):
    """`Calibrator.export`: counts per phase and bin."""

    edges: list[float]
    requests: dict[Phase, list[float]]
    violations: dict[Phase, list[float]]


class LoadForecast(NamedTuple):
    """What the forecast says about one start time."""

    start_s: float
    arrivals_per_s: float
    in_engine: float


class Calibrator:
    """Counts per phase and load; reading is pure arithmetic on them."""

    def __init__(self) -> None:
        self._requests = {phase: [0.0] * NUM_BINS for phase in Phase}
        self._violations = {phase: [0.0] * NUM_BINS for phase in Phase}

    def observe(self, *, load: float, phase: Phase, requests: float, violations: float) -> None:
        """Of ``requests`` judged while ``load`` requests were in the engine, ``violations`` missed the objective."""
        if not (math.isfinite(load) and load >= 0 and 0 <= violations <= requests < math.inf) or requests == 0:
            return
        fade = 0.5 ** (requests / HALF_LIFE)
        self._requests[phase] = [fade * n for n in self._requests[phase]]
        self._violations[phase] = [fade * v for v in self._violations[phase]]
        bin_ = bin_of(load)
        self._requests[phase][bin_] += requests
        self._violations[phase][bin_] += violations

    def num_requests(self, phase: Phase) -> float:
        return math.fsum(self._requests[phase])

    def curve(self, phase: Phase) -> list[Estimate]:
        """An estimate per bin, never falling with load."""
        requests, violations = self._requests[phase], self._violations[phase]
        priors = self._priors(phase)
        means = [
            (v + PRIOR_REQUESTS * p) / (n + PRIOR_REQUESTS)
            for n, v, p in zip(requests, violations, priors, strict=True)
        ]
        pooled = pool_adjacent_violators(means, [n + NO_DATA for n in requests])
        return [
            _estimate(mean, weight + PRIOR_REQUESTS, requests=n)
            for (mean, weight), n in zip(pooled, requests, strict=True)
        ]

    def probability(self, load: float, phase: Phase) -> Estimate:
        return self.curve(phase)[bin_of(load)]

    def sync_costs(self, forecast: Sequence[LoadForecast], *, duration_s: float) -> list[SyncCost]:
        """Expected extra violations of a sync of ``duration_s``, per start time."""
        idle, busy = self.curve(Phase.NONE), self.curve(Phase.SYNC)
        costs = []
        for ahead in forecast:
            bin_ = bin_of(ahead.in_engine)
            excess = max(busy[bin_].probability - idle[bin_].probability, 0.0)
            costs.append(SyncCost(ahead.start_s, ahead.arrivals_per_s * duration_s * excess))
        return costs

    def sync_cost(self, load: LoadForecast, *, duration_s: float) -> float:
        """`sync_costs` of one start time, foreseen or past."""
        return self.sync_costs([load], duration_s=duration_s)[0].violations

    def export(self) -> CalibratorState:
        return CalibratorState(
            edges=list(LOAD_EDGES),
            requests={phase: list(counts) for phase, counts in self._requests.items()},
            violations={phase: list(counts) for phase, counts in self._violations.items()},
        )

    def restore(self, state: CalibratorState) -> None:
        """Take over exported counts.

        Raises:
            ValueError: they have other bins, or are no counts; nothing was taken over.
        """
        if state.edges != list(LOAD_EDGES) or set(state.requests) != set(Phase) or set(state.violations) != set(Phase):
            raise ValueError("calibration has other loads or phases")
        for phase in Phase:
            requests, violations = state.requests[phase], state.violations[phase]
            if len(requests) != NUM_BINS or len(violations) != NUM_BINS:
                raise ValueError("calibration has other loads or phases")
            if any(not 0 <= v <= n * (1 + 1e-9) for v, n in zip(violations, requests, strict=True)):
                raise ValueError("calibration counts more violations than requests")
        self._requests = {phase: list(state.requests[phase]) for phase in Phase}
        self._violations = {phase: list(state.violations[phase]) for phase in Phase}

    def absorb(self, state: CalibratorState, *, at_most: float = math.inf) -> None:
        """Add exported counts; of each phase they weigh at most as much as ``at_most`` requests.

        Raises:
            ValueError: as `restore`.
        """
        added = Calibrator()
        added.restore(state)
        for phase in Phase:
            weight = min(1.0, at_most / max(added.num_requests(phase), 1.0))
            for own, others in ((self._requests, added._requests), (self._violations, added._violations)):
                own[phase] = [mine + weight * more for mine, more in zip(own[phase], others[phase], strict=True)]

    def _priors(self, phase: Phase) -> list[float]:
        """Per bin."""
        if phase is Phase.NONE:
            return [self._rate(phase)] * NUM_BINS
        base = [estimate.probability for estimate in self.curve(Phase.NONE)]
        requests = self._requests[phase]
        expected = math.fsum(n * p for n, p in zip(requests, base, strict=True))
        seen = math.fsum(self._violations[phase]) - expected + PRIOR_REQUESTS * PRIOR_EXCESS[phase]
        excess = seen / (math.fsum(requests) + PRIOR_REQUESTS)
        return [min(max(p + excess, 0.0), 1.0) for p in base]

    def _rate(self, phase: Phase) -> float:
        violations = math.fsum(self._violations[phase]) + PRIOR_VIOLATIONS
        return violations / (self.num_requests(phase) + PRIOR_OVERALL)


def bin_of(load: float) -> int:
    return bisect_right(LOAD_EDGES, load)


def pool_adjacent_violators(means: Sequence[float], weights: Sequence[float]) -> list[tuple[float, float]]:
    """The closest non-falling sequence in weighted squares: (mean, pooled weight) per element."""
    blocks: list[tuple[float, float, int]] = []
    for mean, weight in zip(means, weights, strict=True):
        block = (mean, weight, 1)
        while blocks and blocks[-1][0] >= block[0]:
            above = blocks.pop()
            total = above[1] + block[1]
            block = ((above[0] * above[1] + block[0] * block[1]) / total, total, above[2] + block[2])
        blocks.append(block)
    return [(mean, weight) for mean, weight, length in blocks for _ in range(length)]


def _estimate(mean: float, weight: float, *, requests: float) -> Estimate:
    low, high = wilson_interval(mean, weight)
    return Estimate(mean, min(low, mean), max(high, mean), requests)


def wilson_interval(share: float, num: float, *, z: float = NORMAL_Q95) -> tuple[float, float]:
    """Wilson's score interval of a share that was seen among ``num``; z = 1.645 is two-sided 90 %."""
    center = (share + z * z / (2 * num)) / (1 + z * z / num)
    margin = z / (1 + z * z / num) * math.sqrt(max(share * (1 - share), 0.0) / num + z * z / (4 * num * num))
    return max(center - margin, 0.0), min(center + margin, 1.0)
