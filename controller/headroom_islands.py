"""Headroom where each island comes to a round at its own moment (pure).

Each island is examined by itself, as `controller.headroom` does a fleet: what its own servers cost, when it came
itself. Then all are added up:

    random   every round at a random time, to which all islands come at once: the i-th random schedules are the same
             for all islands, and their costs are added
    oracle   every island at its own cheapest times, wherever those of the others are: a bound that the rounds, which
             islands join within a part of ``sync_timeout_s``, may keep anybody from reaching
    own      what each island paid when it came

Islands of which too little is known are left out; a policy is added up over those at which it can be compared. Of many
islands `MAX_ISLANDS` are looked at, evenly spread over the slots.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from controller.headroom import Examined, Judged, Matched, Window, examine, report, verdict_of
from controller.lab_schema import Headroom, HeadroomVerdict

MAX_ISLANDS = 16
"""Some 20 ms of a thread for each, and as much for each policy."""

UNTOLD = frozenset({HeadroomVerdict.NO_BUDGET, HeadroomVerdict.TOO_LITTLE_DATA})


def sampled(slots: Sequence[int]) -> list[int]:
    """The slots that are looked at."""
    every = max(1, math.ceil(len(slots) / MAX_ISLANDS))
    return list(slots[::every])


def assess_islands(windows: Sequence[Window]) -> Headroom:
    """The headroom of islands, of which there is at least one, together."""
    found = [examine(window) for window in windows]
    told = [one for one in found if verdict_of(one) not in UNTOLD]
    together = _add_up(told) if told else min(found, key=lambda one: one.known)
    return report(together).model_copy(update={"islands": len(told)})


def _add_up(found: Sequence[Examined]) -> Examined:
    tells = [one.tells for one in found if one.tells is not None]
    policies = zip(*(one.judged for one in found), strict=True)
    return replace(
        min(found, key=lambda one: one.known),
        matched=_add_matched([one.matched for one in found if one.matched is not None]),
        tells=statistics.fmean(tells) if tells else None,
        judged=tuple(_add_judged(judged) for judged in policies),
    )


def _add_matched(matched: Sequence[Matched]) -> Matched | None:
    if not matched:
        return None
    # Draws of which nothing is known are missing; the lists are as long as the shortest then.
    draws = zip(*(one.draws for one in matched), strict=False)
    return Matched(
        num_syncs=max(one.num_syncs for one in matched),
        draws=tuple(map(math.fsum, draws)),
        oracle=math.fsum(one.oracle for one in matched),
    )


def _add_judged(judged: Sequence[Judged]) -> Judged:
    """Over the islands at which the policy can be compared; over those whose cost is known where there is none."""
    compared = [one for one in judged if one.matched is not None]
    priced = compared or [one for one in judged if one.own is not None]
    return Judged(
        conduct=judged[0].conduct,
        since_s=min(one.since_s for one in judged),
        syncs=sum(one.syncs for one in judged),
        priced_syncs=sum(one.priced_syncs for one in priced),
        own=math.fsum(one.own for one in priced if one.own is not None) if priced else None,
        matched=_add_matched([one.matched for one in compared if one.matched is not None]),
    )
