"""What a sync would have cost each second lately, per server and per group, and what it is expected to cost.

A *group* are the servers that the islands of one sync are bound to. Its cost in a second is the sum over its servers,
unknown when one of them is unknown.

Memory: a server has a history (a ring of `HISTORY_S` seconds, 15 kB) only once a group asked for it, that is once an
island is bound to it: 10,000 servers of which 1,000 have islands take 15 MB, and 150 MB if all had. A group takes
another 65 kB (`controller.cost_track`). Both are dropped when nobody has asked for them for `FORGET_AFTER_S`.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

from controller.cost_track import CostTrack, total
from controller.policy.cost_view import CostView
from sidecar.schema import LoadSample

HISTORY_S = 1800
MIN_COVERED_S = 0.5
"""A second counts as known when samples cover at least half of it."""
FORGET_AFTER_S = 600.0


class ServerCosts:
    """One server: cost per second on a grid of whole seconds, and the newest forecast.

    A sample's interval rarely is a whole second: each second gets the mean of the samples, weighted by overlap. It is
    told once a sample reaches its middle, so that the newest sample counts at once.
    """

    def __init__(self) -> None:
        self.asked_s = 0.0
        self.num_samples = 0
        self.newest_s = -math.inf
        """End of the newest sample."""
        self.ahead_per_s: tuple[tuple[float, float], ...] = ()
        self._costs = array("f", [0.0]) * HISTORY_S
        self._covered = array("f", [0.0]) * HISTORY_S
        self._newest = -1
        """Newest second of the grid that was touched."""
        self.known_since = sys.maxsize
        """A group that begins now learns from this second on: nothing is known of any before, or it would take long."""

    def add(self, sample: LoadSample) -> None:
        self.num_samples += 1
        self.newest_s = sample.t_s
        self.ahead_per_s = tuple((point.start_s, point.violations) for point in sample.sync_costs_ahead)
        self._move_to(self.told_until)
        if sample.sync_cost_per_s is None or sample.interval_s is None:
            return
        start_s = max(sample.t_s - sample.interval_s, sample.t_s - HISTORY_S + 1)
        self.known_since = min(self.known_since, int(start_s))
        for second in range(int(start_s), math.ceil(sample.t_s)):
            overlap_s = min(sample.t_s, second + 1.0) - max(start_s, float(second))
            if overlap_s > 0:
                self._costs[second % HISTORY_S] += sample.sync_cost_per_s * overlap_s
                self._covered[second % HISTORY_S] += overlap_s

    @property
    def told_until(self) -> int:
        """First second that is not told yet."""
        return math.floor(self.newest_s + 0.5) if self.newest_s > 0 else 0

    def cost_per_s(self, second: int) -> float | None:
        if not self._newest - HISTORY_S < second <= self._newest:
            return None
        covered_s = self._covered[second % HISTORY_S]
        return self._costs[second % HISTORY_S] / covered_s if covered_s >= MIN_COVERED_S else None

    def series(self, seconds: range) -> list[float]:
        """As `cost_per_s`, of many seconds at a fraction of the price; nan where it is unknown."""
        held = range(max(seconds.start, self._newest - HISTORY_S + 1), min(seconds.stop, self._newest + 1))
        if not held:
            return [math.nan] * len(seconds)
        begin, end = held.start % HISTORY_S, (held.stop - 1) % HISTORY_S + 1
        pieces = [slice(begin, end)] if begin < end else [slice(begin, None), slice(0, end)]
        known = [
            cost / covered_s if covered_s >= MIN_COVERED_S else math.nan
            for piece in pieces
            for cost, covered_s in zip(self._costs[piece], self._covered[piece], strict=True)
        ]
        return [math.nan] * (held.start - seconds.start) + known + [math.nan] * (seconds.stop - held.stop)

    def recall(self, past: ServerCosts) -> None:
        """Take over the seconds of ``past`` that nothing is known about here."""
        self._move_to(past._newest)
        for second in range(max(self._newest, past._newest) - HISTORY_S + 1, past._newest + 1):
            index = second % HISTORY_S
            if self._covered[index] == 0.0 and past._newest - HISTORY_S < second:
                self._costs[index], self._covered[index] = past._costs[index], past._covered[index]

    def _move_to(self, second: int) -> None:
        if self._newest < 0:
            self._newest = second  # the ring is still empty
        for passed in range(max(self._newest + 1, second - HISTORY_S + 1), second + 1):
            index = passed % HISTORY_S
            self._costs[index] = self._covered[index] = 0.0
        self._newest = max(self._newest, second)


@dataclass(slots=True)
class _Group:
    track: CostTrack = field(default_factory=CostTrack)
    next_second: int | None = None
    """First second that the track has not seen."""
    asked_s: float = 0.0
    num_samples: int = 0
    seen: CostView | None = None
    """What was made of so many samples: ticks come more often than they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a group cost, second by second; None where that is unknown."""

    first: int
    costs: tuple[float | None, ...]

    @property
    def until(self) -> int:
        return self.first + len(self.costs)


def learn(past: Past, *, sync_s: float) -> CostTrack:
    """A track that has seen all of it: some 40 ms for half an hour, for a thread."""
    track = CostTrack()
    for cost_per_s in past.costs:
        if cost_per_s is None:
            track.gap()
        else:
            track.observe(cost_per_s, sync_s=sync_s)
    return track


class CostBook:
    """Fed with accepted samples, asked by whoever decides. Servers are followed from the first question on."""

    def __init__(self, *, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._servers: dict[str, ServerCosts] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}

    def offer(self, sample: LoadSample) -> None:
        """A sample that `controller.samples.SampleBook` has accepted: of each server in order of time."""
        server = self._servers.get(sample.server_id)
        if server is not None:
            server.add(sample)

    def follow(self, server_ids: Iterable[str], *, now_s: float) -> None:
        """Keep a history of these servers from now on."""
        for server_id in server_ids:
            server = self._servers.get(server_id)
            if server is None:
                server = self._servers[server_id] = ServerCosts()
            server.asked_s = now_s

    def recall(self, past: Mapping[str, ServerCosts], *, now_s: float) -> None:
        """What was known of servers before the start of this process, beside what has come since."""
        self.follow(past, now_s=now_s)
        for server_id, server in past.items():
            self._servers[server_id].recall(server)

    @property
    def groups(self) -> Collection[tuple[str, ...]]:
        """All groups that somebody has asked for lately."""
        return self._groups.keys()

    def known_past(self, server_ids: Collection[str]) -> Past:
        """What is known of a group up to now, for `learn`; nothing from before the first second that is known."""
        servers = [self._servers[server_id] for server_id in server_ids if server_id in self._servers]
        if not servers or len(servers) < len(server_ids):
            return Past(first=0, costs=())
        until = min(server.told_until for server in servers)
        seconds = range(max(until - HISTORY_S + 1, 0), max(until, 0))
        costs = self.series(server_ids, since_s=seconds.start, until_s=seconds.stop)
        unknown = next((at for at, cost in enumerate(costs) if cost is not None), len(costs))
        return Past(first=seconds.start + unknown, costs=costs[unknown:])

    def adopt(self, server_ids: Collection[str], track: CostTrack, *, until: int, now_s: float) -> None:
        """Go on with a group from a track that has seen all seconds before ``until``."""
        self.follow(server_ids, now_s=now_s)
        self._groups[tuple(sorted(server_ids))] = _Group(track=track, next_second=until, asked_s=now_s)

    def series(self, server_ids: Collection[str], *, since_s: float, until_s: float) -> tuple[float | None, ...]:
        """Cost per second of the group in each whole second of ``[since_s, until_s)``; None where it is unknown."""
        servers = [self._servers.get(server_id) for server_id in server_ids]
        known = [server for server in servers if server is not None]
        seconds = range(math.ceil(since_s), math.floor(until_s))
        if not known or len(known) < len(servers):
            return (None,) * len(seconds)
        sums = [0.0] * len(seconds)
        for server in known:
            sums = list(map(add, sums, server.series(seconds)))
        return tuple(None if math.isnan(cost) else cost for cost in sums)

    def view(self, server_ids: Collection[str], *, now_s: float, sync_s: float) -> CostView | None:
        """What a sync of ``sync_s`` seconds of the group costs now; None while that is unknown.

        Unknown is a group without servers, or one of them without a young sample.
        """
        self.follow(server_ids, now_s=now_s)
        key = tuple(sorted(server_ids))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.asked_s = now_s
        servers = [self._servers[server_id] for server_id in key]
        if not servers or any(now_s - server.newest_s > self._stale_after_s for server in servers):
            # Nothing will be predicted before all of them are heard again; what they missed are gaps then.
            return None
        num_samples = sum(server.num_samples for server in servers)
        if self._advance(group, servers, now_s=now_s, sync_s=sync_s) or num_samples != group.num_samples:
            group.num_samples = num_samples
            group.seen = _see(group.track, servers)
        return group.seen

    def forget(self, now_s: float) -> None:
        """Drop what nobody has asked for."""
        self._servers = {name: s for name, s in self._servers.items() if now_s - s.asked_s <= FORGET_AFTER_S}
        self._groups = {key: group for key, group in self._groups.items() if now_s - group.asked_s <= FORGET_AFTER_S}

    def _advance(self, group: _Group, servers: list[ServerCosts], *, now_s: float, sync_s: float) -> bool:
        """Show the track every second that is over (told by all, or too late); whether there was one."""
        told_until = min(server.told_until for server in servers)
        until = max(min(told_until, math.floor(now_s + 0.5)), math.floor(now_s - self._stale_after_s))
        first = max(until - HISTORY_S + 1, 0)
        if group.next_second is None:
            # To a track that has seen nothing a gap is nothing: half an hour of them would hold up a tick.
            begin = max(first, min(until, max(server.known_since for server in servers)))
        else:
            begin = max(group.next_second, first)
        for second in range(begin, until):
            cost_per_s = total([server.cost_per_s(second) for server in servers])
            if cost_per_s is None:
                group.track.gap()
            else:
                group.track.observe(cost_per_s, sync_s=sync_s)
        group.next_second = max(begin, until)
        return begin < until


def _see(track: CostTrack, servers: list[ServerCosts]) -> CostView | None:
    if track.expected_per_s is None:
        return None
    return CostView(
        expected_per_s=track.expected_per_s,
        recent_per_s=track.recent.ascending(),
        decorrelation_s=track.decorrelation_s,
        ahead_per_s=_sum_ahead(servers),
    )


def _sum_ahead(servers: list[ServerCosts]) -> tuple[tuple[float, float], ...]:
    """The forecasts added up where all have the same start times; empty when one is unknown."""
    first = servers[0].ahead_per_s
    if len(servers) == 1:
        return first
    starts_s = [start_s for start_s, _ in first]
    if any([start_s for start_s, _ in server.ahead_per_s] != starts_s for server in servers):
        return ()
    return tuple(
        (start_s, math.fsum(server.ahead_per_s[index][1] for server in servers))
        for index, start_s in enumerate(starts_s)
    )
