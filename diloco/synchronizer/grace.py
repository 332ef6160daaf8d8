"""How long a round stays open after its quorum: as long as stragglers were late in recent rounds. Pure.

A contribution is late by the time from the quorum-th arrival of its round to its own. With L the lateness of all
contributions behind the quorum in the last `ROUNDS_KEPT` rounds, those that missed their round included,

    grace = median(L) + SPREADS * 1.4826 * MAD(L),          clipped to [floor, ceiling]

Those that missed their round are in L because islands say, before they contribute, to which round they come: without
them L would hold what fitted into earlier graces, and a grace could only shrink.

MAD(L) is the median of |L - median(L)|; 1.4826 times it estimates the standard deviation of a normal distribution, and
three of those above the median keep out one in 740 of its stragglers. Median and MAD do not follow a single outlier
(each withstands up to half of the values), so one island that hung for minutes does not stretch the rounds after it.

Arrivals are kept relative to the first of their round, so that L can be computed for any quorum. While nobody was late,
nothing is known of how late one may be: then the grace is its ceiling, and a straggler is seen or is not there.
The round closes before the grace ends when nobody is awaited any more: when as many contributed as the round was
directed to, or, where nobody says that number, when every slot is in that contributed to one of the last
`LIVE_ROUNDS` rounds.

What was learned is kept with each generation, and so survives a restart; of the arrivals to a round that closed before
the restart those that come after it are not learned from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

ROUNDS_KEPT = 16
"""Enough for a spread, few enough to follow a load that changes within the hour."""
LIVE_ROUNDS = 3
"""An island that died is waited for in so many rounds, where no controller says who is there."""
SPREADS = 3.0
NORMAL_SPREAD = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When the contributions of one round came."""

    round: int
    offsets_s: Mapping[int, float]
    """By slot, in seconds since the first of them."""

    def with_late(self, slot: int, offset_s: float) -> Arrivals:
        """The same with a slot that came after the round had closed; its first arrival counts."""
        return Arrivals(round=self.round, offsets_s={slot: max(offset_s, 0.0), **self.offsets_s})


def remember(history: Sequence[Arrivals], arrivals: Arrivals) -> tuple[Arrivals, ...]:
    """The history with one more round, or with a newer word on its last one."""
    before = [known for known in history if known.round < arrivals.round]
    return (*before, arrivals)[-ROUNDS_KEPT:]


def lateness_s(history: Iterable[Arrivals], quorum: int) -> list[float]:
    """How long after the quorum-th arrival those behind it came."""
    late: list[float] = []
    for arrivals in history:
        offsets_s = sorted(arrivals.offsets_s.values())
        if len(offsets_s) > quorum:
            late.extend(offset_s - offsets_s[quorum - 1] for offset_s in offsets_s[quorum:])
    return late


def grace_s(history: Iterable[Arrivals], quorum: int, *, floor_s: float, ceiling_s: float) -> float:
    """How long a round waits for stragglers after its quorum."""
    late_s = lateness_s(history, quorum)
    if not late_s:
        return ceiling_s
    middle_s = median(late_s)
    spread_s = NORMAL_SPREAD * median(abs(value_s - middle_s) for value_s in late_s)
    return min(max(middle_s + SPREADS * spread_s, floor_s), ceiling_s)


def live_slots(history: Sequence[Arrivals]) -> frozenset[int]:
    """Slots that contributed lately."""
    return frozenset(slot for arrivals in history[-LIVE_ROUNDS:] for slot in arrivals.offsets_s)
