"""The plugin source: exact numbers of every engine step, from the rings that the plugin keeps in the gate's folder.

Reads whatever the files hold: one that is truncated, replaced or foreign is left out, a record that is torn or not yet
written ends the reading until the next poll, and one that was overwritten before it was read is counted as lost. Its
tokens and requests are not lost with it, as records carry totals; only its latencies are.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from sidecar.slo import Slo, SloMetric
from sidecar.slo.judge import judge_request
from sidecar.source.snapshot import EngineSnapshot, Histogram, Judged, ScrapeOutcome, ScrapeResult
from sidecar.vllm_plugin.files import open_regular
from sidecar.vllm_plugin.gate_reader import AHEAD_NS, ALIVE_NS
from sidecar.vllm_plugin.records import (
    RECORD_BYTES,
    RING_CAPACITY,
    RING_HEADER_BYTES,
    RING_MAGIC,
    RING_MAGIC_FAMILY,
    FinishedRequest,
    RingHeader,
    StepRecord,
    decode_pulse,
    decode_record,
    decode_ring_header,
    record_offset,
)
from sidecar.vllm_plugin.step_ring import RING_GLOB

logger = logging.getLogger(__name__)

MAX_RINGS = 64
METRICS = (SloMetric.TTFT, SloMetric.ITL, SloMetric.TPOT, SloMetric.E2E)
SIGNAL = "plugin:steps"
SIGNALS = ("running", "waiting", "kv_usage", "steps", "finished", "prompt_tokens", "generation_tokens", "preemptions",
           "ttft", "itl", "tpot", "e2e")  # fmt: skip


@dataclass(slots=True)
class Tally:
    """Latencies so far, in a histogram whose edges are the thresholds that matter: judging by them is exact."""

    edges_s: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges_s) + 1)

    def add(self, values_s: Iterable[float]) -> None:
        for value_s in values_s:
            if math.isfinite(value_s) and value_s >= 0:
                self.counts[bisect.bisect_left(self.edges_s, value_s)] += 1
                self.total_s += value_s

    def merged(self, other: Tally) -> Tally:
        both = Tally(self.edges_s)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.total_s = self.total_s + other.total_s
        return both

    def histogram(self) -> Histogram:
        cumulative, seen = [], 0.0
        for count in self.counts:
            seen += count
            cumulative.append(seen)
        return Histogram(edges=(*self.edges_s, math.inf), cumulative=tuple(cumulative), total=self.total_s)


class Ring:
    """One ring, followed from the moment it was opened."""

    def __init__(self, path: Path, slo: Slo) -> None:
        """Raises:
        OSError: it cannot be read.
        """
        self._slo = slo
        self._fd = open_regular(path, os.O_RDONLY)
        opened = os.fstat(self._fd)
        self.inode = (opened.st_dev, opened.st_ino)
        self.header: RingHeader | None = None
        self.last: StepRecord | None = None
        self.lost_records = 0
        self.heartbeat_ns = 0
        self.other_version = False
        self.ttft, self.itl, self.tpot, self.e2e = (Tally(edges_of(slo, metric)) for metric in METRICS)
        self.judged = Judged(0.0, 0.0, 0.0)
        self._next = 0

    def poll(self) -> None:
        """Take in every record that came since."""
        head = self._pread(RING_HEADER_BYTES, 0)
        self.other_version = head.startswith(RING_MAGIC_FAMILY) and not head.startswith(RING_MAGIC)
        header, pulse = decode_ring_header(head), decode_pulse(head)
        if header is None or pulse is None or (self.header is not None and header != self.header):
            self.heartbeat_ns = 0  # not, or no longer, what it was
            return
        self.header = header
        self.heartbeat_ns, written = pulse
        if not self._next:
            self._begin(written)
        for _ in range(RING_CAPACITY):
            record = self._record(self._next)
            if record is not None and record.sequence > self._next:
                self._skip_to(record.sequence - RING_CAPACITY + RING_CAPACITY // 8)  # the writer goes on meanwhile
            elif record is not None and record.sequence == self._next:
                self._take(record)
            elif written >= self._next:
                self._skip_to(self._next + 1)  # written, and damaged since
            else:
                return

    def is_alive(self, now_ns: int) -> bool:
        return self.header is not None and -AHEAD_NS < now_ns - self.heartbeat_ns <= ALIVE_NS

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _begin(self, written: int) -> None:
        """Where the totals stand; the latencies of what was before are not told.

        ``written`` is as of the last heartbeat, and steps go on between two of them.
        """
        before = self._record(written) if written else None
        self.last = before if before is not None and before.sequence == written else None
        self._next = written + 1
        while (record := self._record(self._next)) is not None and record.sequence == self._next:
            self.last = record
            self._next += 1

    def _take(self, record: StepRecord) -> None:
        self.ttft.add(record.ttft_s)
        self.itl.add(record.itl_s)
        for latencies_s in record.finished:
            self._judge(latencies_s)
        self.last = record
        self._next = record.sequence + 1

    def _judge(self, latencies_s: FinishedRequest) -> None:
        self.tpot.add((latencies_s.tpot_s,))
        self.e2e.add((latencies_s.e2e_s,))
        violated, may_have = judge_request(self._slo, latencies_s)
        requests, violations, upper = self.judged
        self.judged = Judged(requests + 1, violations + violated, upper + may_have)

    def _skip_to(self, oldest: int) -> None:
        oldest = max(oldest, self._next + 1)
        self.lost_records += oldest - self._next
        self._next = oldest

    def _record(self, sequence: int) -> StepRecord | None:
        return decode_record(self._pread(RECORD_BYTES, record_offset(sequence)))

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, num_bytes, offset)
        except (OSError, OverflowError):
            return b""


class RingSource:
    """All rings of one server: a ring per engine and API server."""

    def __init__(self, directory: Path, slo: Slo) -> None:
        self._directory = directory
        self._slo = slo
        self._rings: dict[Path, Ring] = {}
        self._warned = False
        self.max_num_seqs: int | None = None
        """Requests that one engine runs at once, as its configuration says; the metrics do not export it."""

    @property
    def lost_records(self) -> int:
        return sum(ring.lost_records for ring in self._rings.values())

    def read(self, *, t_s: float, monotonic_s: float) -> EngineSnapshot | None:
        """What the engines did so far; None while no plugin lives."""
        self._follow()
        now_ns = int(monotonic_s * 1e9)
        living: list[Ring] = []
        for ring in self._rings.values():
            ring.poll()
            if ring.is_alive(now_ns):
                living.append(ring)
        if not living:
            self._warn_of_other_version()
            return None
        seqs = [ring.header.max_num_seqs for ring in living if ring.header is not None and ring.header.max_num_seqs]
        self.max_num_seqs = max(seqs, default=None)
        return summarize(living, t_s=t_s, monotonic_s=monotonic_s)

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def _warn_of_other_version(self) -> None:
        found = any(ring.other_version for ring in self._rings.values())
        if found and not self._warned:
            logger.warning(
                "the plugin in the server is of another version, its steps cannot be read folder=%s: install the "
                "wadiloco-vllm-plugin that belongs to this sidecar, and start the server anew",
                self._directory,
            )
        self._warned = found

    def _follow(self) -> None:
        """Open rings that are new or were replaced, close those that are gone."""
        found = sorted(self._directory.glob(RING_GLOB))[:MAX_RINGS]
        for path in [path for path in self._rings if path not in found or not _is_same(path, self._rings[path])]:
            self._rings.pop(path).close()
        for path in found:
            if path not in self._rings:
                with contextlib.suppress(OSError):
                    self._rings[path] = Ring(path, self._slo)


def summarize(rings: list[Ring], *, t_s: float, monotonic_s: float) -> EngineSnapshot:
    """One snapshot of all engines: totals add up, of an engine's gauges the newest step counts."""
    newest: dict[int, StepRecord] = {}
    records = []
    for ring in rings:
        if ring.last is None or ring.header is None:
            continue
        records.append(ring.last)
        known = newest.get(ring.header.engine)
        if known is None or ring.last.at_ns > known.at_ns:
            newest[ring.header.engine] = ring.last
    usages = [record.kv_usage for record in newest.values() if 0.0 <= record.kv_usage <= 1.0]
    created_ns = min(ring.header.created_ns for ring in rings if ring.header is not None)
    return EngineSnapshot(
        t_s=t_s,
        monotonic_s=monotonic_s,
        num_engines=len({ring.header.engine for ring in rings if ring.header is not None}),
        running=float(sum(record.running for record in newest.values())),
        waiting=float(sum(record.waiting for record in newest.values())),
        kv_usage_mean_frac=sum(usages) / len(usages) if usages else None,
        kv_usage_max_frac=max(usages, default=None),
        steps=float(sum(record.step for record in records)),
        finished=float(sum(record.finished_total for record in records)),
        prompt_tokens=float(sum(record.prompt_tokens_total for record in records)),
        generation_tokens=float(sum(record.generation_tokens_total for record in records)),
        preemptions=float(sum(record.preemptions_total for record in records)),
        ttft=_merged(ring.ttft for ring in rings),
        itl=_merged(ring.itl for ring in rings),
        tpot=_merged(ring.tpot for ring in rings),
        e2e=_merged(ring.e2e for ring in rings),
        judged=Judged(*(sum(column) for column in zip(*(ring.judged for ring in rings), strict=True))),
        created_s=created_ns / 1e9,
        exact=True,
        writers=frozenset(ring.header for ring in rings if ring.header is not None),
        signals=dict.fromkeys(SIGNALS, SIGNAL),
    )


def edges_of(slo: Slo, metric: SloMetric) -> tuple[float, ...]:
    """The thresholds that latencies of this metric are held against; requests are held to that of ITL by their TPOT."""
    metrics = (SloMetric.ITL, SloMetric.TPOT) if metric is SloMetric.TPOT else (metric,)
    return tuple(sorted({slo.threshold_s(one) for one in metrics} - {math.inf}))


def _merged(tallies: Iterable[Tally]) -> Histogram:
    return functools.reduce(Tally.merged, tallies).histogram()


def overlay(result: ScrapeResult, exact: EngineSnapshot | None) -> ScrapeResult:
    """A scrape with everything that the plugin knows better; the plugin alone where the scrape failed.

    A server that refuses connections is not up, whatever its plugin says: at a start the plugin lives before anybody
    listens (3.5 s were seen), and falls silent in between.
    """
    if exact is None or result.outcome is ScrapeOutcome.REFUSED:
        return result
    page = result.snapshot
    if page is None:
        return replace(
            result,
            outcome=ScrapeOutcome.OK,
            page_outcome=result.outcome,
            snapshot=exact,
            t_s=exact.t_s,
            monotonic_s=exact.monotonic_s,
        )
    snapshot = replace(
        exact,
        t_s=page.t_s,
        monotonic_s=page.monotonic_s,
        waiting_capacity=page.waiting_capacity,
        kv_capacity_tokens=page.kv_capacity_tokens,
        asleep=page.asleep,
        rejections=page.rejections,
        process_start_s=page.process_start_s,
        signals={**page.signals, **exact.signals},
    )
    return replace(result, snapshot=snapshot)


def _is_same(path: Path, ring: Ring) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == ring.inode
