"""What happened between two snapshots of one server (pure).

vLLM exports no arrival counter. A request that arrived is waiting, running without its first token (in prefill), has
its first token, or was rejected at admission, so that

    arrivals = Δ first tokens + Δ waiting + Δ in prefill + Δ rejections.

Requests in prefill are not exported either. Those that run are in prefill or in decode, and decode gains a request
with its first token and loses it when it finishes:

    Δ in prefill = Δ running - (Δ first tokens - Δ finished),   within [-running before, +running now].

Without its bounds the sum is the balance ``Δ(running + waiting) + Δ finished + Δ rejections``: nothing is counted
twice, not even a preempted request that goes from running back to waiting. Clients that hang up in decode are often not
counted as finished, which makes the balance too low by one each; the bounds limit that to what can have been in
prefill, so that between two empty moments the estimate is the exact Δ first tokens. What remains: up to one missed
arrival per uncounted abort of a busy interval, and requests that hang up before their first token are never seen.
A server that exports no rejections has no admission limit to reject by; one that exports no finished count gets
Δ in prefill = 0, an error that cancels out over time. The result is clamped at 0.

A restart is seen by a later process start or counter creation, or by any counter that fell: that interval is dropped.
So is one whose ends were counted by different writers (one of several API servers hung, or came back with its totals).
In Prometheus multiprocess mode neither start nor creation is exported, and a busy server may pass its old counts before
it is scraped again: there a refused connection between two pages counts as a restart too (`same_life`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sidecar.source.snapshot import EngineSnapshot, Histogram, Judged

COUNTERS = ("steps", "finished", "prompt_tokens", "generation_tokens", "preemptions", "rejections")
HISTOGRAMS = ("ttft", "itl", "tpot", "e2e")
# The kernel derives a process's start time from the boot time, which clock corrections move by fractions of a second.
START_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Differences over one interval; None where either end does not know."""

    length_s: float
    arrivals: float | None
    finished: float | None
    prompt_tokens: float | None
    generation_tokens: float | None
    preemptions: float | None
    rejections: float | None
    ttft: Histogram | None
    itl: Histogram | None
    tpot: Histogram | None
    e2e: Histogram | None
    judged: Judged | None
    in_engine_before: float | None
    """Requests in the engine as the interval began."""


def difference(before: EngineSnapshot, now: EngineSnapshot) -> Interval | None:
    """What happened between the snapshots.

    None when the server restarted in between, no time passed, or other sources or writers counted.
    """
    length_s = now.monotonic_s - before.monotonic_s
    changed = before.exact != now.exact or before.writers != now.writers
    if length_s <= 0 or changed or restarted(before, now):
        return None
    return Interval(
        length_s=length_s,
        arrivals=estimate_arrivals(before, now),
        finished=_delta(before.finished, now.finished),
        prompt_tokens=_delta(before.prompt_tokens, now.prompt_tokens),
        generation_tokens=_delta(before.generation_tokens, now.generation_tokens),
        preemptions=_delta(before.preemptions, now.preemptions),
        rejections=_delta(before.rejections, now.rejections),
        ttft=histogram_delta(before.ttft, now.ttft),
        itl=histogram_delta(before.itl, now.itl),
        tpot=histogram_delta(before.tpot, now.tpot),
        e2e=histogram_delta(before.e2e, now.e2e),
        judged=_judged_delta(before, now),
        in_engine_before=before.in_engine,
    )


def restarted(before: EngineSnapshot, now: EngineSnapshot) -> bool:
    """Whether the counters of ``now`` started anew after ``before``; False between different sources."""
    if before.exact != now.exact:
        return False
    if _later(before.process_start_s, now.process_start_s):
        return True
    if before.writers != now.writers:
        return not before.writers & now.writers and _later(before.created_s, now.created_s)
    return (
        _later(before.created_s, now.created_s)
        or any(_fell(getattr(before, name), getattr(now, name)) for name in COUNTERS)
        or any(_histogram_fell(getattr(before, name), getattr(now, name)) for name in HISTOGRAMS)
    )


def same_life(before: EngineSnapshot, now: EngineSnapshot) -> bool:
    """Whether the server says that it did not restart. In Prometheus multiprocess mode it says nothing, hence False."""
    return _stays(before.process_start_s, now.process_start_s) or _stays(before.created_s, now.created_s)


def estimate_arrivals(before: EngineSnapshot, now: EngineSnapshot) -> float | None:
    """Requests that arrived between two snapshots of one server life (see the module's text)."""
    first_tokens = _delta(_count(before.ttft), _count(now.ttft))
    waiting = _delta(before.waiting, now.waiting)
    if first_tokens is None or waiting is None or before.running is None or now.running is None:
        return None
    finished = _delta(before.finished, now.finished)
    in_prefill = 0.0
    if finished is not None:
        balance = now.running - before.running - (first_tokens - finished)
        in_prefill = min(max(balance, -before.running), now.running)
    rejections = _delta(before.rejections, now.rejections) or 0.0
    return max(first_tokens + waiting + in_prefill + rejections, 0.0)


def histogram_delta(before: Histogram | None, now: Histogram | None) -> Histogram | None:
    """Observations that came between; None when an end is missing, the edges changed, or observations disappeared."""
    if before is None or now is None or before.edges != now.edges:
        return None
    gained = tuple(b - a for a, b in zip(before.cumulative, now.cumulative, strict=True))
    if any(a > b for a, b in pairwise((0.0, *gained))):
        return None
    return Histogram(edges=now.edges, cumulative=gained, total=max(now.total - before.total, 0.0))


def _judged_delta(before: EngineSnapshot, now: EngineSnapshot) -> Judged | None:
    """Requests judged in between. Those that finished without having been judged (their records were lost) may have
    violated."""
    if before.judged is None or now.judged is None:
        return None
    requests, violations, upper = (b - a for a, b in zip(before.judged, now.judged, strict=True))
    lost = max((_delta(before.finished, now.finished) or 0.0) - requests, 0.0)
    return Judged(requests + lost, violations, upper + lost)


def _delta(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before


def _count(histogram: Histogram | None) -> float | None:
    return None if histogram is None else histogram.count


def _later(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now > before + START_TOLERANCE_S


def _stays(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and abs(now - before) <= START_TOLERANCE_S


def _fell(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now < before


def _histogram_fell(before: Histogram | None, now: Histogram | None) -> bool:
    if before is None or now is None or before.edges != now.edges:
        return False
    return any(b < a for a, b in zip(before.cumulative, now.cumulative, strict=True))
