"""What a fault cost, from what could be seen from outside (pure).

A slot is seen as `Sample`s, taken whenever something in it changed: times are known to a poll's period.

    trains again    first step beyond all that the slot had shown before, taken by what is there after the fault
    steps lost      the furthest step before minus the least shown after it, or, where the count goes on and the work
                    since the last sync is dropped, the steps since the sync that are gone: the greater of the two
                    (those of a contribution that is on its way are among them)
    gap             longest time between two steps of an island
    goodput         share of the wall time in which steps counted: the time from one new furthest step to the next where
                    that is no longer than three times the usual, minus the time of the steps that were lost
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

USUAL_GAPS = 3.0
"""A step that takes longer than so many usual ones was kept from counting by something else."""

START_S, LEAST_S = 20.0, 10.0
"""Seconds in which a process loads what it needs, and the fewest from which its growth is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A slot at a moment."""

    t_s: float
    agent_id: str
    instance: str
    pids: tuple[int, ...]
    """Of its rank workers."""
    step: int
    since_sync: int
    round: int
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """A fault as it happened."""

    t_s: float
    over_s: float
    """When what was done was undone; ``t_s`` where nothing was to be undone."""
    pid: int | None = None
    """Of the process that was hit."""
    instance: str | None = None
    """Of the agent that was hit; None where it was another process."""
    undone: bool = False
    """Whether the process that was hit goes on by itself."""

    def is_after(self, sample: Sample) -> bool:
        """Whether it shows what is there after the fault, and not what was said before it and heard late."""
        if self.undone and sample.t_s > self.over_s:
            return True
        if sample.t_s <= self.t_s:
            return False
        if self.instance is not None:
            return sample.instance != self.instance
        return self.pid is None or (self.pid not in sample.pids and bool(sample.pids))


def furthest(samples: Iterable[Sample], *, until_s: float) -> int:
    """The furthest step shown until then; -1 where there was none."""
    return max((sample.step for sample in samples if sample.t_s <= until_s), default=-1)


def trains_again_s(samples: Sequence[Sample], blow: Blow) -> float | None:
    """When the slot took its first step beyond; None while it has not."""
    before = max((sample.step for sample in samples if not blow.is_after(sample)), default=-1)
    return next((sample.t_s for sample in samples if blow.is_after(sample) and sample.step > before), None)


def steps_lost(samples: Sequence[Sample], blow: Blow) -> int:
    """Steps whose work was gone after the fault."""
    earlier = [sample for sample in samples if not blow.is_after(sample)]
    if not earlier:
        return 0
    # An agent may say that the work is gone before it says that the worker is; a sync, too, ends with none.
    last = max(earlier, key=lambda sample: (sample.step, sample.round, sample.since_sync))
    again_s = trains_again_s(samples, blow)
    later = [s for s in samples if blow.is_after(s) and (again_s is None or s.t_s <= again_s)]
    if not later or (later[0].instance, later[0].pids) == (last.instance, last.pids):
        return 0  # it went on by itself
    back = max(last.step - sample.step for sample in later)
    # What is shown first is what it begins from; later samples have new steps in them.
    return max(0, back, last.since_sync - later[0].since_sync)


def longest_gap_s(samples: Sequence[Sample], *, since_s: float, until_s: float) -> float:
    """Longest time without a new furthest step in an interval; all of it where there was none."""
    times = [since_s, *(t_s for t_s in advances(samples) if since_s < t_s < until_s), until_s]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def advances(samples: Iterable[Sample]) -> list[float]:
    """When the slot came further than ever before."""
    found, most = [], -1
    for sample in samples:
        if sample.step > most:
            most = sample.step
            found.append(sample.t_s)
    return found


def usual_gap_s(samples: Sequence[Sample]) -> float | None:
    """Median time between two advances; None before there were two."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(advances(samples))]
    return statistics.median(gaps) if gaps else None


def counted_s(samples: Sequence[Sample], *, since_s: float, until_s: float, lost: int) -> float:
    """Seconds of the interval in which steps counted; ``lost`` of the steps did not."""
    usual_s = usual_gap_s(samples)
    if usual_s is None:
        return 0.0
    times = [t_s for t_s in advances(samples) if since_s <= t_s <= until_s]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    good_s = sum(gap for gap in gaps if gap <= USUAL_GAPS * usual_s)
    kept = furthest(samples, until_s=until_s) - furthest(samples, until_s=since_s)
    return good_s * max(0.0, 1.0 - lost / kept) if kept > 0 else 0.0


def goodput_frac(slots: Sequence[Sequence[Sample]], *, since_s: float, until_s: float, lost: Sequence[int]) -> float:
    """Mean over the slots of the share of the time in which steps counted."""
    wall_s = until_s - since_s
    if wall_s <= 0 or not slots:
        return 0.0
    shares = [
        counted_s(samples, since_s=since_s, until_s=until_s, lost=gone) / wall_s
        for samples, gone in zip(slots, lost, strict=True)
    ]
    return min(1.0, statistics.fmean(shares))


def growth_mb_per_min(sizes: Sequence[tuple[float, float]]) -> float | None:
    """Slope of a process's memory (time in s, size in MiB) by least squares, from when it has started.

    None of one that did not live for long enough after that.
    """
    settled = [(t_s, size) for t_s, size in sizes if t_s - sizes[0][0] >= START_S]
    if len(settled) < 3 or settled[-1][0] - settled[0][0] < LEAST_S:
        return None
    times, values = zip(*settled, strict=True)
    return 60.0 * statistics.linear_regression(times, values).slope
