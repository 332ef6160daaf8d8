"""Headroom: what the timing of syncs could have saved over a recent window (pure).

With s[t] the realised cost of syncing, per second, a sync of d seconds that starts in second t costs

    c[t] = s[t] + ... + s[t + d - 1]          (the last second in part; unknown if any of them is)

in expected SLO violations. For n syncs whose starts are g seconds or more apart:

    random   mean and spread over `NUM_DRAWS` schedules, uniform over all that keep the gap
             (the i-th smallest of n uniform draws, plus i g: as `policy.random_deferral` has it)
    oracle   the cheapest schedule, by dynamic programming:
             best[k][t] = min(best[k][t + 1], c[t] + best[k - 1][t + g])
    share    (random - own) / (random - oracle)

The oracle looks into the future, and even of pure noise it picks the cheap seconds. Hence two tests before there is
anything to gain: the gap must stand out of the spread of random schedules and matter beside their cost, and what is
known when a sync starts must tell something of its cost. The latter is r, the correlation of s[t - 1] with c[t] over
the m starts where both are known: of independent seconds it is 0 with a spread of 1 / sqrt(m), however long a sync is.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from controller.lab_schema import Headroom, HeadroomVerdict, PolicyHeadroom

NUM_DRAWS = 500
"""The mean of so many is known to a twentieth of the spread."""
MAX_SYNCS = 60
"""More would make the dynamic programme long and say no more: the newest part of the window with so many is used."""
MIN_KNOWN_STARTS = 300
"""Five minutes in which a sync could have started."""
MIN_KNOWN_FRAC = 0.5
NOISE_SDS = 1.0
"""Of one random schedule: with less to win, luck decides the window. The gap grows with the number of syncs, the spread
with its root, so that a longer window can tell more."""
MIN_GAP_FRAC = 0.05
"""A gap of less than this share of what random schedules cost is not worth a policy."""
MIN_CORRELATION_SDS = 3.0
SMALLEST_GAP = 1e-9

Costs = Sequence[float | None]


class CostSource(Protocol):
    """The realised cost of syncing, per second, as the sidecars told."""

    def series(self, server_ids: Sequence[str], *, since_s: float, until_s: float) -> tuple[float | None, ...]:
        """Expected violations per second that a sync would have added on these servers together, one value for each
        second from ``since_s``; None where it is unknown for any of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What one policy did in the window."""

    policy: str
    shadow: bool
    since_s: float
    """When it began to run: earlier seconds are not its own."""
    starts_s: tuple[float, ...]
    """Unix times at which its syncs began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """All that headroom is computed from: a snapshot, so that it can be done in another thread."""

    since_s: float
    costs_per_s: tuple[float | None, ...]
    """Second by second from ``since_s``."""
    syncs_per_s: float | None
    """The budget's number over its horizon, or its rate; None without."""
    min_gap_s: float
    sync_s: float
    conducts: tuple[Conduct, ...]
    """The policy in force first."""

    @property
    def until_s(self) -> float:
        return self.since_s + len(self.costs_per_s)

    @property
    def gap(self) -> int:
        """Whole seconds between two starts: syncs do not overlap."""
        """As `spacing_s`, but no longer than the window, in which there is room for one sync either way."""
        return max(1, min(self.spacing_s, len(self.costs_per_s)))

    @property
    def spacing_s(self) -> int:
        """Whole seconds between two starts: the budget's gap, and never less than a sync takes."""
        return max(1, math.ceil(max(self.min_gap_s, self.sync_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """So many syncs, placed at random and at best."""

    num_syncs: int
    draws: tuple[float, ...]
    """What each random schedule cost."""
    oracle: float

    @property
    def random(self) -> float:
        return statistics.fmean(self.draws)

    @property
    def random_sd(self) -> float:
        return statistics.pstdev(self.draws)

    @property
    def gap(self) -> float:
        return self.random - self.oracle

    @property
    def stands_out(self) -> bool:
        """Whether the gap is more than noise, and matters."""
        return self.gap > max(NOISE_SDS * self.random_sd, MIN_GAP_FRAC * self.random, SMALLEST_GAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What a window told, before anything is said of it."""

    window: Window
    """The part that was looked at."""
    asked: int | None
    """How many syncs were to be placed in all of it."""
    known: int
    """Starts whose cost is known."""
    num_starts: int
    matched: Matched | None
    tells: float | None
    """Correlation of a second's cost with that of a sync that starts after it."""
    judged: tuple[Judged, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one policy did, and what as many random and best syncs would have cost."""

    conduct: Conduct
    since_s: float
    syncs: int
    priced_syncs: int
    own: float | None
    matched: Matched | None


def assess(window: Window) -> Headroom:
    """The headroom of a window, and how much of it each policy took."""
    return report(examine(window))


def examine(window: Window) -> Examined:
    window = _newest(window, len(window.costs_per_s) - _leading_unknown(window.costs_per_s))
    asked = _num_syncs(window)
    # More syncs than `MAX_SYNCS` are looked at in a part of the window.
    length = len(window.costs_per_s)
    kept = _newest(window, length if asked is None else min(length, length * MAX_SYNCS // asked))
    costs = start_costs(kept.costs_per_s, kept.sync_s)
    return Examined(
        window=kept,
        asked=asked,
        known=sum(cost is not None for cost in costs),
        num_starts=len(costs),
        matched=match(costs, min(asked or 0, MAX_SYNCS), kept.gap),
        tells=predictability(kept.costs_per_s, costs),
        judged=tuple(_judge(conduct, kept) for conduct in window.conducts),
    )


def report(found: Examined) -> Headroom:
    """What is said of it."""
    kept, matched, verdict = found.window, found.matched, verdict_of(found)
    shown = matched if verdict not in {HeadroomVerdict.NO_BUDGET, HeadroomVerdict.TOO_LITTLE_DATA} else None
    return Headroom(
        t_s=kept.until_s,
        window_s=float(len(kept.costs_per_s)),
        covered_s=float(sum(cost is not None for cost in kept.costs_per_s)),
        verdict=verdict,
        syncs=found.asked if shown is None else shown.num_syncs,
        min_gap_s=float(kept.spacing_s),
        sync_s=kept.sync_s,
        random_cost=None if shown is None else shown.random,
        random_sd=None if shown is None else shown.random_sd,
        oracle_cost=None if shown is None else shown.oracle,
        gap=None if shown is None else shown.gap,
        predictability=found.tells if found.known >= MIN_KNOWN_STARTS else None,
        policies=tuple(map(_tell, found.judged)),
    )


def start_costs(costs_per_s: Costs, sync_s: float) -> list[float | None]:
    """What a sync costs by the second in which it starts, for all starts after which it is over within the window."""
    length = max(1, math.ceil(sync_s))
    last = sync_s - (length - 1)
    sums = _prefix_sums([cost or 0.0 for cost in costs_per_s])
    gaps = _prefix_sums([float(cost is None) for cost in costs_per_s])
    return [
        None
        if gaps[at + length] > gaps[at]
        else max(0.0, sums[at + length - 1] - sums[at]) + last * (costs_per_s[at + length - 1] or 0.0)
        for at in range(len(costs_per_s) - length + 1)
    ]


def match(costs: Costs, num_syncs: int, gap: int) -> Matched | None:
    """Random and best schedules of ``num_syncs`` syncs, or of as many as fit; None where none is known."""
    fit = min(num_syncs, (len(costs) - 1) // gap + 1) if costs else 0
    oracle = oracle_costs(costs, fit, gap)
    # Next to unknown seconds fewer may fit than the window has room for.
    num = next((k for k in range(len(oracle), 0, -1) if math.isfinite(oracle[k - 1])), 0)
    draws = random_costs(costs, num, gap) if num else ()
    return Matched(num_syncs=num, draws=draws, oracle=oracle[num - 1]) if draws else None


def oracle_costs(costs: Costs, num_syncs: int, gap: int) -> list[float]:
    """The least that 1, 2, ... ``num_syncs`` syncs can cost; infinite where they do not fit."""
    priced = [math.inf if cost is None else cost for cost in costs]
    rest = [0.0] * (len(priced) + gap)  # the least that the syncs placed so far cost from each second on
    found = []
    for _ in range(num_syncs):
        here = map(operator.add, priced, rest[gap:])
        backwards = list(itertools.accumulate(reversed(list(here)), min))
        rest = backwards[::-1] + [math.inf] * gap
        found.append(rest[0])
    return found


def random_costs(costs: Costs, num_syncs: int, gap: int) -> tuple[float, ...]:
    """What `NUM_DRAWS` random schedules cost; starts of unknown cost count like the others of their schedule."""
    span = len(costs) - (num_syncs - 1) * gap
    rng = random.Random("headroom")
    found = []
    for _ in range(NUM_DRAWS):
        starts = sorted(int(rng.random() * span) for _ in range(num_syncs))
        drawn = [costs[start + index * gap] for index, start in enumerate(starts)]
        priced = [cost for cost in drawn if cost is not None]
        if priced:
            found.append(sum(priced) * num_syncs / len(priced))
    return tuple(found)


def predictability(costs_per_s: Costs, costs: Costs) -> float | None:
    """Correlation of a second's cost with that of a sync that starts right after it; None where nothing varies."""
    pairs = [
        (before, after)
        for before, after in zip(costs_per_s, costs[1:], strict=False)
        if before is not None and after is not None
    ]
    if len(pairs) < 2:
        return None
    try:
        return statistics.correlation(*zip(*pairs, strict=True))
    except statistics.StatisticsError:
        return None  # One of the two never changes.


def _num_syncs(window: Window) -> int | None:
    if window.syncs_per_s is not None:
        return max(1, round(window.syncs_per_s * len(window.costs_per_s))) if window.syncs_per_s > 0 else None
    own = len(_starts(window.conducts[0], window)) if window.conducts else 0
    return own or None


def _leading_unknown(costs_per_s: Costs) -> int:
    """Seconds from before anything was known: the controller, or its fleet, is that young."""
    return next((at for at, cost in enumerate(costs_per_s) if cost is not None), len(costs_per_s))


def _newest(window: Window, length: int) -> Window:
    """The last ``length`` seconds of the window."""
    costs = window.costs_per_s[len(window.costs_per_s) - length :]
    return replace(window, since_s=window.until_s - len(costs), costs_per_s=costs)


def verdict_of(found: Examined) -> HeadroomVerdict:
    matched, tells, known = found.matched, found.tells, found.known
    if found.asked is None:
        return HeadroomVerdict.NO_BUDGET
    if matched is None or known < MIN_KNOWN_STARTS or known < MIN_KNOWN_FRAC * found.num_starts:
        return HeadroomVerdict.TOO_LITTLE_DATA
    if not matched.stands_out:
        return HeadroomVerdict.NOTHING_TO_GAIN
    if tells is None or abs(tells) < MIN_CORRELATION_SDS / math.sqrt(known):
        return HeadroomVerdict.UNPREDICTABLE
    return HeadroomVerdict.ENOUGH


def _judge(conduct: Conduct, window: Window) -> Judged:
    """One policy against as many random and best syncs in its own part of the window."""
    since_s = max(conduct.since_s, window.since_s)
    skipped = min(len(window.costs_per_s), max(0, math.ceil(since_s - window.since_s)))
    costs = start_costs(window.costs_per_s[skipped:], window.sync_s)
    starts = _starts(conduct, window)
    at = [int(start_s - window.since_s) - skipped for start_s in starts]
    priced = [cost for index in at if 0 <= index < len(costs) and (cost := costs[index]) is not None]
    known = sum(cost is not None for cost in costs)
    enough = known >= MIN_KNOWN_STARTS and 0 < len(priced) <= MAX_SYNCS
    matched = match(costs, len(priced), window.gap) if enough else None
    if matched is not None and matched.num_syncs < len(priced):
        matched = None  # Its syncs were closer together than the gap, so that no schedule compares.
    return Judged(
        conduct=conduct,
        since_s=since_s,
        syncs=len(starts),
        priced_syncs=len(priced),
        own=sum(priced) if priced else None,
        matched=matched,
    )


def _tell(judged: Judged) -> PolicyHeadroom:
    own, matched = judged.own, judged.matched
    return PolicyHeadroom(
        policy=judged.conduct.policy,
        shadow=judged.conduct.shadow,
        since_s=judged.since_s,
        syncs=judged.syncs,
        priced_syncs=judged.priced_syncs,
        cost=own,
        random_cost=None if matched is None else matched.random,
        oracle_cost=None if matched is None else matched.oracle,
        share_closed=_share(own, matched),
        as_cheap_frac=_as_cheap_frac(own, matched),
    )


def _starts(conduct: Conduct, window: Window) -> list[float]:
    """Starts within the window of syncs that are over."""
    since_s = max(conduct.since_s, window.since_s)
    return [start_s for start_s in conduct.starts_s if since_s <= start_s <= window.until_s - window.sync_s]


def _share(own: float | None, matched: Matched | None) -> float | None:
    if own is None or matched is None or not matched.stands_out:
        return None
    return (matched.random - own) / matched.gap


def _as_cheap_frac(own: float | None, matched: Matched | None) -> float | None:
    if own is None or matched is None:
        return None
    return sum(cost <= own + SMALLEST_GAP for cost in matched.draws) / len(matched.draws)


def _prefix_sums(values: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(values)]
