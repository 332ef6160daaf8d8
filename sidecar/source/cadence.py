"""How often to scrape, from what the scrapes take (pure).

A scrape costs vLLM's event loop some 5 ms while it is idle, and a server that is slow to answer has better things to
do. The interval is the shortest that keeps the share of time spent in scrapes under `MAX_SHARE`,

    interval' = clamp(duration / MAX_SHARE, interval / 2, interval · 2), within [usual, longest],

so that one slow answer at most doubles it, and it returns by itself. A refusal takes no time: the interval stays short,
and the server is seen as soon as it is back.
"""

from __future__ import annotations

MAX_SHARE = 0.2


def next_interval_s(interval_s: float, duration_s: float, *, usual_s: float, longest_s: float) -> float:
    """The interval after a scrape that took ``duration_s``, ``interval_s`` having been in force."""
    wanted_s = min(max(duration_s / MAX_SHARE, interval_s / 2), interval_s * 2)
    return min(max(wanted_s, usual_s), longest_s)
