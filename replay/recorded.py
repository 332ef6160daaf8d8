"""What recorded runs say about SLO violations: one observation per interval of a sidecar, from a controller's journal.

A sample carries what its trainers told the sidecar (``trainer_phase``). Samples without it come from runs without a
gate, in which islands train whenever they live: then the interval was ``sync`` where a round's report of an island
beside that server overlaps it for at least `MIN_SHARE`, else ``inner`` where such an island lived, else ``none``.

A run without training has no sidecar, and the requests of its clients stand for the intervals that one would have seen.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.journal_file import JournalReader
from controller.records import AgentRecord, RoundEntry
from replay.loadgen import RequestResult, Status
from replay.requests_file import read_requests
from replay.slo import violates
from service.errors import InputError, UnavailableError
from sidecar.calibrator import Calibrator, Phase
from sidecar.schema import LoadSample
from sidecar.slo import Slo
from sidecar.trainers import MIN_SHARE


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval of one server."""

    server_id: str
    load: float
    """Requests in the engine, the mean of both ends."""
    phase: Phase
    requests: float
    violations: float


@dataclass(frozen=True, slots=True)
class Span:
    """Unix times between which something went on."""

    start_s: float
    end_s: float

    def overlap_s(self, start_s: float, end_s: float) -> float:
        return max(min(self.end_s, end_s) - max(self.start_s, start_s), 0.0)


class Training:
    """When islands lived and synced, by server and by node (pure)."""

    def __init__(self, agents: Iterable[AgentRecord], rounds: Iterable[RoundEntry]) -> None:
        self._alive: defaultdict[str, list[Span]] = defaultdict(list)
        self._syncs: defaultdict[str, list[Span]] = defaultdict(list)
        beside: defaultdict[int, set[str]] = defaultdict(set)
        for agent in agents:
            place = _place(server_id=agent.server_id, node=agent.node)
            self._alive[place].append(Span(agent.registered_s, agent.last_beat_s))
            for slot in {agent.slot, agent.last_slot} - {None}:
                assert slot is not None
                beside[slot].add(place)
        for entry in rounds:
            for told in entry.reports:
                for place in beside[told.slot]:
                    self._syncs[place].append(Span(told.report.started_s, told.report.finished_s))

    def phase(self, sample: LoadSample) -> Phase:
        """What the islands beside the sample's server did in its interval."""
        length_s = sample.interval_s or 0.0
        start_s, end_s = sample.t_s - length_s, sample.t_s
        for phase, spans in ((Phase.SYNC, self._syncs), (Phase.INNER, self._alive)):
            for place in (_place(server_id=sample.server_id), _place(node=sample.node)):
                longest_s = max((span.overlap_s(start_s, end_s) for span in spans[place]), default=0.0)
                if longest_s > 0 and longest_s >= MIN_SHARE * length_s:
                    return phase
        return Phase.NONE


def observations(samples: Iterable[LoadSample], training: Training) -> Iterator[Observation]:
    """An observation per interval in which requests were judged (pure); intervals of unknown load are left out."""
    last: dict[str, LoadSample] = {}
    for sample in samples:
        before, last[sample.server_id] = last.get(sample.server_id), sample
        loads = [_in_engine(before), _in_engine(sample)]
        if sample.interval_s is None or not sample.slo_requests or sample.slo_violations is None:
            continue
        if loads[0] is None or loads[1] is None:
            continue
        yield Observation(
            server_id=sample.server_id,
            load=(loads[0] + loads[1]) / 2,
            phase=training.phase(sample) if sample.trainer_phase is None else Phase(sample.trainer_phase),
            requests=sample.slo_requests,
            violations=sample.slo_violations,
        )


@dataclass(slots=True)
class Counted:
    """What one file gave."""

    intervals: int = 0
    requests: float = 0.0
    servers: frozenset[str] = frozenset()


def count_journal(path: Path, into: Calibrator, *, server_id: str | None = None) -> Counted:
    """Add a journal's observations, of one server or of all.

    Raises:
        InputError: it is no journal, or one of another version.
    """
    reader = JournalReader(path)
    try:
        training = Training(reader.values("agents", AgentRecord), reader.values("rounds", RoundEntry))
        return _count(observations(reader.samples(), training), into, server_id=server_id)
    except UnavailableError as exc:
        raise InputError(
            f"{path} {exc.message}", field="journal", remedy="give the --journal file of a controller"
        ) from exc


def _count(seen: Iterable[Observation], into: Calibrator, *, server_id: str | None) -> Counted:
    counted, servers = Counted(), set()
    for one in seen:
        servers.add(one.server_id)
        if server_id is None or server_id == one.server_id:
            into.observe(load=one.load, phase=one.phase, requests=one.requests, violations=one.violations)
            counted.intervals += 1
            counted.requests += one.requests
    counted.servers = frozenset(servers)
    return counted


def request_observations(
    results: Sequence[RequestResult], slo: Slo, *, interval_s: float = 1.0
) -> Iterator[Observation]:
    """What a sidecar would have seen of these requests, without training (pure).

    Requests in flight at a client stand for those in the engine; cancelled requests do not count.
    """
    counted = [result for result in results if result.status is not Status.CANCELLED]
    for server in sorted({result.server_index for result in counted}):
        ended = sorted(
            (result.ended_unix_s, violates(result, slo)) for result in counted if result.server_index == server
        )
        ends_s = [end_s for end_s, _ in ended]
        starts_s = sorted(result.sent_unix_s for result in counted if result.server_index == server)

        def in_flight(t_s: float, starts_s: list[float] = starts_s, ends_s: list[float] = ends_s) -> int:
            return bisect_right(starts_s, t_s) - bisect_right(ends_s, t_s)

        begin = 0
        while begin < len(ended):
            # From end to end, not from interval to interval: silence between two requests costs nothing.
            tick = max(math.ceil((ends_s[begin] - starts_s[0]) / interval_s), 1)
            before_s, now_s = starts_s[0] + (tick - 1) * interval_s, starts_s[0] + tick * interval_s
            judged = ended[begin : max(bisect_right(ends_s, now_s), begin + 1)]
            begin += len(judged)
            yield Observation(
                server_id=f"server-{server}",
                load=(in_flight(before_s) + in_flight(now_s)) / 2,
                phase=Phase.NONE,
                requests=len(judged),
                violations=sum(is_violation for _, is_violation in judged),
            )


def count_requests(path: Path, into: Calibrator, slo: Slo, *, server_id: str | None = None) -> Counted:
    """Add the observations of a run without training.

    Raises:
        InputError: as `read_requests`.
    """
    return _count(request_observations(read_requests(path), slo), into, server_id=server_id)


def _in_engine(sample: LoadSample | None) -> float | None:
    if sample is None or sample.running is None or sample.waiting is None:
        return None
    return sample.running + sample.waiting


def _place(*, server_id: str | None = None, node: str | None = None) -> str:
    return f"server {server_id}" if server_id is not None else f"node {node}"
