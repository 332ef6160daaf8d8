"""Samples of the sidecars: each is judged alone, the newest good one per server counts.

A server's load is known while its newest sample is young, its engine serves, and the sample carries a pressure.
Everything else is unknown, and unknown is full.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import ValidationError

from controller.policy.base import ServerView
from controller.sample_limits import find_absurd
from controller.schema import ServerStatus
from sidecar.schema import EngineState, ForecastPoint, LoadSample

# A host's clock may run ahead by this much; a sample from further ahead would shadow all later ones.
FUTURE_TOLERANCE_S = 5.0
# Older samples say nothing about now and would only be history; relays that catch up send them by the thousand.
PAST_TOLERANCE_S = 60.0
# A server that was silent for so long was taken out of the fleet.
FORGET_AFTER_S = 3600.0
# Sidecars send a forecast every five seconds, as long as they have one.
FORECAST_STALE_S = 15.0
# Bounds memory against a sender that makes up names.
MAX_SERVERS = 50_000
# Where there is no room for a new one, one that was silent for so long gives way. To look for them takes milliseconds.
GIVES_WAY_AFTER_S = PAST_TOLERANCE_S
FORGET_AT_ONCE = 1000
LOOK_EVERY_S = 1.0

KNOWN_STATES = frozenset({EngineState.READY, EngineState.SLEEPING})


class SampleOutcome(StrEnum):
    """What became of a sample. Exported as a metric label."""

    ACCEPTED = "accepted"
    INVALID = "invalid"
    ABSURD = "absurd"
    """A value that no server has."""
    FROM_FUTURE = "from_future"
    TOO_OLD = "too_old"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out_of_order"
    TOO_MANY_SERVERS = "too_many_servers"


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: SampleOutcome
    sample: LoadSample | None = None
    detail: str = ""


class SampleBook:
    """The newest sample of each server."""

    def __init__(self, samples: Iterable[LoadSample], *, stale_after_s: float) -> None:
        self._latest: dict[str, LoadSample] = {}
        self._of_node: dict[str, dict[str, None]] = {}
        """Ids of the servers of each node, in the order in which they were heard of."""
        self._forecasts: dict[str, tuple[float, tuple[ForecastPoint, ...]]] = {}
        """When each server's newest forecast was made, and the forecast: not every sample carries one."""
        self._stale_after_s = stale_after_s
        self._forgotten: list[str] = []
        """Of which nobody was told yet."""
        self._looked_s = -math.inf
        for sample in samples:
            self._keep(sample)

    def offer(self, raw: object, now_s: float, *, correction_s: float = 0.0) -> Verdict:
        """Judge one sample, and keep it when it is good, in the time of ``now_s``.

        That of the hosts, by which it was stamped, is ``correction_s`` seconds ahead.
        """
        try:
            sample = LoadSample.model_validate(raw)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return Verdict(SampleOutcome.INVALID, detail=f"{where}: {first['msg']}")
        if correction_s:
            sample = sample.model_copy(update={"t_s": sample.t_s - correction_s})
        absurd = find_absurd(sample)
        if absurd is not None:
            return Verdict(SampleOutcome.ABSURD, detail=absurd)
        outcome = self._judge(sample, now_s)
        if outcome is SampleOutcome.ACCEPTED:
            self._keep(sample)
            return Verdict(outcome, sample)
        if outcome is SampleOutcome.TOO_MANY_SERVERS:
            heard = f"{len(self._latest)} servers are known, and were heard of within {GIVES_WAY_AFTER_S:g} s"
            return Verdict(outcome, sample, heard)
        return Verdict(outcome, sample, f"t_s {sample.t_s:.3f}")

    def _judge(self, sample: LoadSample, now_s: float) -> SampleOutcome:
        if sample.t_s > now_s + FUTURE_TOLERANCE_S:
            return SampleOutcome.FROM_FUTURE
        if sample.t_s < now_s - PAST_TOLERANCE_S:
            return SampleOutcome.TOO_OLD
        last = self._latest.get(sample.server_id)
        if last is None:
            return SampleOutcome.ACCEPTED if self._has_room(now_s) else SampleOutcome.TOO_MANY_SERVERS
        if sample.t_s == last.t_s:
            return SampleOutcome.DUPLICATE
        return SampleOutcome.OUT_OF_ORDER if sample.t_s < last.t_s else SampleOutcome.ACCEPTED

    def _keep(self, sample: LoadSample) -> None:
        before = self._latest.get(sample.server_id)
        if before is None or before.node != sample.node:
            self._leave_node(before)
            self._of_node.setdefault(sample.node, {})[sample.server_id] = None
        self._latest[sample.server_id] = sample
        if sample.forecast:
            self._forecasts[sample.server_id] = (sample.t_s, sample.forecast)

    def _leave_node(self, sample: LoadSample | None) -> None:
        if sample is None:
            return
        others = self._of_node[sample.node]
        del others[sample.server_id]
        if not others:
            del self._of_node[sample.node]

    def forget(self, now_s: float) -> list[str]:
        """Drop servers that were silent for `FORGET_AFTER_S`; names of all that were dropped since the last call."""
        self._drop([name for name, sample in self._latest.items() if now_s - sample.t_s > FORGET_AFTER_S])
        forgotten, self._forgotten = self._forgotten, []
        return [name for name in forgotten if name not in self._latest]

    def _has_room(self, now_s: float) -> bool:
        """Whether there is room for another server, if need be that of the longest-silent ones."""
        if len(self._latest) < MAX_SERVERS:
            return True
        if abs(now_s - self._looked_s) < LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        silent = ((one.t_s, name) for name, one in self._latest.items() if now_s - one.t_s > GIVES_WAY_AFTER_S)
        self._drop([name for _, name in heapq.nsmallest(FORGET_AT_ONCE, silent)])
        return len(self._latest) < MAX_SERVERS

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._leave_node(self._latest.pop(name))
            self._forecasts.pop(name, None)
            self._forgotten.append(name)

    def views_beside(self, islands: Iterable[tuple[str, str | None]], now_s: float) -> tuple[ServerView, ...]:
        """The servers that islands, by node and named server, may compete with: of a large fleet a small part."""
        names: dict[str, None] = {}
        for node, server_id in islands:
            if server_id is not None:
                names[server_id] = None
            else:
                names |= self._of_node.get(node, {})
        return tuple(self._view(sample, now_s) for name in names if (sample := self._latest.get(name)) is not None)

    def _view(self, sample: LoadSample, now_s: float) -> ServerView:
        return ServerView(
            server_id=sample.server_id,
            node=sample.node,
            pressure_frac=sample.pressure_frac if self._is_known(sample, now_s) else None,
        )

    def statuses(self, now_s: float) -> list[ServerStatus]:
        return [
            ServerStatus(
                server_id=sample.server_id,
                node=sample.node,
                sample=sample,
                age_s=max(0.0, now_s - sample.t_s),
                known=self._is_known(sample, now_s),
            )
            for _, sample in sorted(self._latest.items())
        ]

    def newest(self, now_s: float) -> Iterator[tuple[LoadSample, bool]]:
        """The newest sample of each server, and whether its load is known."""
        return ((sample, self._is_known(sample, now_s)) for sample in self._latest.values())

    @property
    def latest(self) -> Collection[LoadSample]:
        """The newest sample of each server."""
        return self._latest.values()

    @property
    def server_ids(self) -> Collection[str]:
        return self._latest.keys()

    def find(self, server_id: str) -> LoadSample | None:
        return self._latest.get(server_id)

    def forecast(self, server_id: str) -> tuple[float, tuple[ForecastPoint, ...]] | None:
        """When the server's forecast in force was made, in Unix seconds, and the forecast; None without a young one."""
        newest, made = self._latest.get(server_id), self._forecasts.get(server_id)
        if newest is None or made is None or newest.t_s - made[0] > FORECAST_STALE_S:
            return None
        return made

    def num_known(self, now_s: float) -> tuple[int, int]:
        """How many servers' load is known, and how many's is not."""
        known = sum(self._is_known(sample, now_s) for sample in self._latest.values())
        return known, len(self._latest) - known

    def _is_known(self, sample: LoadSample, now_s: float) -> bool:
        young = now_s - sample.t_s <= self._stale_after_s
        return young and sample.state in KNOWN_STATES and sample.pressure_frac is not None


def _share_of(name: str) -> float:
    """A number in [0, 1) for each name, evenly spread."""
    return zlib.crc32(name.encode()) / 2**32


class SampleLog:
    """Which samples the journal's log gets: one per server and interval, or every one."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._logged_s: dict[str, float] = {}

    def is_due(self, sample: LoadSample) -> bool:
        """Whether this one goes into the log; then the next one is due an interval later."""
        if self._every_s == 0:
            return True
        last_s = self._logged_s.get(sample.server_id)
        if last_s is None:
            # Servers have their turns one after another, whenever they were first heard of.
            self._logged_s[sample.server_id] = sample.t_s - self._every_s * _share_of(sample.server_id)
            return True
        if sample.t_s - last_s < self._every_s:
            return False
        self._logged_s[sample.server_id] = sample.t_s
        return True

    def forget(self, server_id: str) -> None:
        self._logged_s.pop(server_id, None)
