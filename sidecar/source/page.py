"""The samples of one page that matter, and the snapshot that they make (pure).

An engine is an ``engine`` label, under Ray together with its ``ReplicaId``. Counters and requests are summed over the
engines of a page; of KV usage there is a mean and a maximum. A gauge that one engine lacks is unknown as a whole: the
sum over the others would read as less load. One case is told apart: in Prometheus multiprocess mode (no ``process_``
series) a gauge is absent until it is set first, and the engine's steps set it. An engine whose step counter is on the
page and 0 has no gauges, and nothing that runs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sidecar.source.signals import ALIASES, HISTOGRAM_ALIASES, LOAD_GAUGES, NEEDED_SIGNALS, Wanted, series_of
from sidecar.source.snapshot import EngineSnapshot, Histogram, finite

MAX_COUNT = 2.0**53
"""Counters beyond it are not exact as floats, and no server reaches it: what claims more is unknown."""
MAX_REQUESTS = 1e9
NEVER_STEPPED: frozenset[EngineKey] = frozenset()


class PageError(ValueError):
    """A page that claims to be metrics and cannot be read."""


class EngineKey(NamedTuple):
    replica: str
    engine: str


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float

    @property
    def engine(self) -> EngineKey | None:
        engine = self.labels.get("engine")
        return None if engine is None else EngineKey(self.labels.get("ReplicaId", ""), engine)


@dataclass(slots=True)
class Page:
    """Samples by signal, alias and part."""

    samples: dict[Wanted, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    process_start_s: float | None = None

    def pick(self, signal: str, part: str = "value") -> list[Sample]:
        rank = self.rank(signal)
        return [] if rank is None else self.samples.get(Wanted(signal, rank, part), [])

    def rank(self, signal: str) -> int | None:
        return min((wanted.rank for wanted in self.samples if wanted.signal == signal), default=None)

    def engines(self) -> frozenset[EngineKey]:
        keys = (sample.engine for samples in self.samples.values() for sample in samples)
        return frozenset(key for key in keys if key is not None)

    def never_stepped(self) -> frozenset[EngineKey]:
        """Engines of a page in multiprocess mode that have set no gauge yet."""
        if self.process_start_s is not None:
            return NEVER_STEPPED
        steps = ((sample.engine, sample.value) for sample in self.pick("steps"))
        return frozenset(key for key, value in steps if key is not None and value == 0)


def assemble(page: Page, *, prefix: str, t_s: float, monotonic_s: float) -> EngineSnapshot:
    """The snapshot of a page, taken at ``t_s`` (Unix) alias ``monotonic_s``.

    Raises:
        PageError: a bucket without a number as ``le``.
    """
    engines, unset = page.engines(), page.never_stepped()

    def gauge(signal: str) -> list[float]:
        return _per_engine(page.pick(signal), engines, unset)

    usage = gauge("kv_usage")
    usage = [min(max(value, 0.0), 1.0) for value in usage] if all(map(math.isfinite, usage)) else []
    capacity = [sample for sample in page.pick("waiting_capacity") if sample.labels.get("reason") == "capacity"]
    return EngineSnapshot(
        t_s=t_s,
        monotonic_s=monotonic_s,
        num_engines=max(len(engines), 1),
        running=_sum(gauge("running"), MAX_REQUESTS),
        waiting=_sum(gauge("waiting"), MAX_REQUESTS),
        waiting_capacity=_sum(_per_engine(capacity, engines, NEVER_STEPPED), MAX_REQUESTS),
        kv_usage_mean_frac=sum(usage) / len(usage) if usage else None,
        kv_usage_max_frac=max(usage, default=None),
        kv_capacity_tokens=_kv_capacity(page.pick("kv_capacity")),
        asleep=_asleep(page.pick("sleep_state")),
        process_start_s=page.process_start_s,
        created_s=min((s.value for s in page.pick("created") if math.isfinite(s.value)), default=None),
        steps=_total(page, "steps"),
        finished=_total(page, "finished"),
        prompt_tokens=_total(page, "prompt_tokens"),
        generation_tokens=_total(page, "generation_tokens"),
        preemptions=_total(page, "preemptions"),
        rejections=_total(page, "rejections"),
        ttft=_histogram(page, "ttft"),
        itl=_histogram(page, "itl"),
        tpot=_histogram(page, "tpot"),
        e2e=_histogram(page, "e2e"),
        signals=_signals(page, prefix),
        missing=_missing(page, nothing_set=bool(engines) and engines <= unset),
    )


def _signals(page: Page, prefix: str) -> dict[str, str | None]:
    ranks = {signal: page.rank(signal) for signal in (*ALIASES, *HISTOGRAM_ALIASES)}
    return {signal: None if rank is None else series_of(prefix, signal, rank) for signal, rank in ranks.items()}


def _missing(page: Page, *, nothing_set: bool) -> tuple[str, ...]:
    absent = [signal for signal in NEEDED_SIGNALS if page.rank(signal) is None]
    return tuple(signal for signal in absent if not (nothing_set and signal in LOAD_GAUGES))


def _per_engine(samples: Iterable[Sample], engines: frozenset[EngineKey], unset: frozenset[EngineKey]) -> list[float]:
    """Values of a gauge with 0 for each engine of ``unset`` without one; empty when another engine lacks it."""
    values = [(sample.engine, sample.value) for sample in samples]
    labelled = {key for key, _ in values if key is not None}
    lacking = engines - labelled
    if (values and not labelled) or not lacking:
        return [value for _, value in values]
    return [*(value for _, value in values), *(0.0 for _ in lacking)] if lacking <= unset else []


def _total(page: Page, signal: str) -> float | None:
    return _sum([sample.value for sample in page.pick(signal)], MAX_COUNT)


def _sum(values: list[float], most: float) -> float | None:
    """The sum; None without values, and when one of them or the sum cannot be (NaN fails every comparison)."""
    if not values or not all(0 <= value <= most for value in values):
        return None
    total = sum(values)
    return total if total <= most else None


def _asleep(samples: list[Sample]) -> bool | None:
    """True when an engine of the server is not awake."""
    awake = [sample.value for sample in samples if sample.labels.get("sleep_state") == "awake"]
    return min(awake) == 0 if awake else None


def _kv_capacity(samples: list[Sample]) -> float | None:
    """Tokens that the KV caches hold; older versions tell blocks and their size instead."""
    tokens = []
    for sample in samples:
        size = _number(sample.labels.get("kv_cache_size_tokens"))
        blocks, block = _number(sample.labels.get("num_gpu_blocks")), _number(sample.labels.get("block_size"))
        if size is None and blocks is not None and block is not None:
            size = blocks * block
        tokens.append(math.nan if size is None else size)
    return _sum(tokens, MAX_COUNT)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else finite(float(text))
    except ValueError:
        return None


def _histogram(page: Page, signal: str) -> Histogram | None:
    """Buckets summed per ``le`` over engines and models; None when they do not fit together."""
    buckets: defaultdict[float, float] = defaultdict(float)
    times: Counter[float] = Counter()
    for sample in page.pick(signal, "bucket"):
        edge = _edge(signal, sample)
        buckets[edge] += sample.value
        times[edge] += 1
    total = _sum([sample.value for sample in page.pick(signal, "sum")], MAX_COUNT)
    edges = tuple(sorted(buckets))
    cumulative = tuple(buckets[edge] for edge in edges)
    if total is None or not edges or edges[-1] != math.inf or len(set(times.values())) != 1:
        return None
    grows = all(a <= b for a, b in zip((0.0, *cumulative), (*cumulative, MAX_COUNT), strict=True))
    return Histogram(edges=edges, cumulative=cumulative, total=total) if grows else None


def _edge(signal: str, sample: Sample) -> float:
    try:
        edge = float(sample.labels["le"])
    except (KeyError, ValueError) as exc:
        raise PageError(f"bucket of {signal} without a number as le") from exc
    if math.isnan(edge):
        raise PageError(f"bucket of {signal} without a number as le")
    return edge
