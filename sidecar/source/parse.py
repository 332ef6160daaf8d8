"""Parse the few series that matter out of a vLLM ``/metrics`` page.

A page has some 450 samples in 50 KB, and about a quarter of them matter: lines are filtered by name before anything
else is done with them. Prometheus text and OpenMetrics write a sample alike (``name{labels} value …``, what follows
the value is a timestamp or an exemplar); OpenMetrics also ends with ``# EOF``, without which the page is cut off.
Samples are keyed by their own name, not by the family's type, which the two formats state differently.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sidecar.source.snapshot import EngineSnapshot, Histogram, finite

ALIASES: dict[str, tuple[str, ...]] = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "sleep_state": ("engine_sleep_state",),
    "steps": ("iteration_tokens_total_count",),
    "finished": ("request_success_total",),
    "prompt_tokens": ("prompt_tokens_total",),
    "generation_tokens": ("generation_tokens_total",),
    "preemptions": ("num_preemptions_total",),
    "rejections": ("admission_rejections_total",),
    "created": ("generation_tokens_created",),
}
"""Signal → names that vLLM has exported it under, newest first. The first one on the page is taken alone: while a name
is being deprecated both are exported, and adding them would count twice."""

HISTOGRAM_ALIASES: dict[str, tuple[str, ...]] = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "tpot": ("request_time_per_output_token_seconds",),
    "e2e": ("e2e_request_latency_seconds",),
}
NEEDED_SIGNALS = ("running", "waiting", "kv_usage", "steps", "finished", "generation_tokens", "ttft", "itl", "e2e")
"""Signals without which the sidecar is blind to something; the others are absent from some versions or modes."""

PROCESS_START = "process_start_time_seconds"
SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?[ \t]+(?P<value>\S+)"
)
LABEL = re.compile(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"")


class PageError(ValueError):
    """A page that claims to be metrics and cannot be read."""


class Wanted(NamedTuple):
    signal: str
    rank: int
    """Place of the matching name in its alias list."""
    part: str
    """``value``, or ``bucket``, ``sum`` of a histogram."""


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Page:
    """The samples of one page that matter, by signal, alias and part."""

    samples: dict[Wanted, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    has_series: bool = False
    process_start_s: float | None = None

    def pick(self, signal: str, part: str = "value") -> list[Sample]:
        rank = self.rank(signal)
        return [] if rank is None else self.samples.get(Wanted(signal, rank, part), [])

    def rank(self, signal: str) -> int | None:
        return min((wanted.rank for wanted in self.samples if wanted.signal == signal), default=None)

    def engines(self) -> set[str]:
        return {s.labels["engine"] for samples in self.samples.values() for s in samples if "engine" in s.labels}


class PageParser:
    """Parses pages whose series begin with ``prefix`` (``vllm:``, or ``ray_vllm_`` under Ray Serve)."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._wanted = dict(_wanted_names(prefix))

    def parse(self, text: str, *, content_type: str, t_s: float, monotonic_s: float) -> EngineSnapshot | None:
        """The snapshot, or None when no series of the page has the prefix.

        Raises:
            PageError: a line that matters cannot be read, or an OpenMetrics page is cut off.
        """
        if "openmetrics" in content_type.lower() and not text.rstrip().endswith("# EOF"):
            raise PageError("OpenMetrics page without # EOF: cut off")
        page = self._read(text.splitlines())
        if not page.has_series:
            return None
        return self._assemble(page, t_s=t_s, monotonic_s=monotonic_s)

    def _read(self, lines: Iterable[str]) -> Page:
        page = Page()
        for line in lines:
            if line.startswith(self._prefix):
                page.has_series = True
                wanted = self._wanted.get(line.partition("{")[0].partition(" ")[0])
                if wanted is not None:
                    page.samples[wanted].append(parse_sample(line))
            elif line.startswith(PROCESS_START):
                page.process_start_s = finite(parse_sample(line).value)
        return page

    def _assemble(self, page: Page, *, t_s: float, monotonic_s: float) -> EngineSnapshot:
        engines = page.engines()
        running, waiting, usage = (_per_engine(page.pick(name), engines) for name in ("running", "waiting", "kv_usage"))
        return EngineSnapshot(
            t_s=t_s,
            monotonic_s=monotonic_s,
            num_engines=max(len(engines), 1),
            running=_sum(running),
            waiting=_sum(waiting),
            kv_usage_mean_frac=_as_fraction(sum(usage) / len(usage)) if usage else None,
            kv_usage_max_frac=_as_fraction(max(usage)) if usage else None,
            asleep=_asleep(page.pick("sleep_state")),
            process_start_s=page.process_start_s,
            created_s=min((s.value for s in page.pick("created")), default=None),
            steps=_sum(_values(page.pick("steps"))),
            finished=_sum(_values(page.pick("finished"))),
            prompt_tokens=_sum(_values(page.pick("prompt_tokens"))),
            generation_tokens=_sum(_values(page.pick("generation_tokens"))),
            preemptions=_sum(_values(page.pick("preemptions"))),
            rejections=_sum(_values(page.pick("rejections"))),
            ttft=_histogram(page, "ttft"),
            itl=_histogram(page, "itl"),
            tpot=_histogram(page, "tpot"),
            e2e=_histogram(page, "e2e"),
            signals=self._signals(page),
        )

    def _signals(self, page: Page) -> dict[str, str | None]:
        names = {**ALIASES, **HISTOGRAM_ALIASES}
        ranks = {signal: page.rank(signal) for signal in names}
        return {signal: None if rank is None else self._prefix + names[signal][rank] for signal, rank in ranks.items()}


def parse_sample(line: str) -> Sample:
    """Labels and value of one sample line.

    Raises:
        PageError: the line is not a sample.
    """
    match = SAMPLE.match(line)
    if match is None:
        raise PageError(f"not a sample: {line[:120]!r}")
    try:
        value = float(match["value"])
    except ValueError as exc:
        raise PageError(f"not a number: {line[:120]!r}") from exc
    return Sample(dict(LABEL.findall(match["labels"] or "")), value)


def _wanted_names(prefix: str) -> Iterator[tuple[str, Wanted]]:
    for signal, names in ALIASES.items():
        for rank, name in enumerate(names):
            yield prefix + name, Wanted(signal, rank, "value")
    for signal, names in HISTOGRAM_ALIASES.items():
        for rank, name in enumerate(names):
            for part in ("bucket", "sum"):
                yield f"{prefix}{name}_{part}", Wanted(signal, rank, part)


def _values(samples: list[Sample]) -> list[float]:
    return [sample.value for sample in samples]


def _per_engine(samples: list[Sample], engines: set[str]) -> list[float]:
    """Values of a gauge, or none of them when an engine of the page lacks it.

    In multiprocess mode a gauge that was never set is absent: the sum over the other engines would read as less load.
    """
    labelled = {sample.labels["engine"] for sample in samples if "engine" in sample.labels}
    return [] if labelled and labelled != engines else _values(samples)


def _sum(values: list[float]) -> float | None:
    total = finite(sum(values)) if values else None
    return total if total is None or total >= 0 else None


def _as_fraction(value: float) -> float | None:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else None


def _asleep(samples: list[Sample]) -> bool | None:
    """True when an engine of the server is not awake."""
    awake = [sample.value for sample in samples if sample.labels.get("sleep_state") == "awake"]
    return min(awake) == 0 if awake else None


def _histogram(page: Page, signal: str) -> Histogram | None:
    """Buckets summed per ``le`` over engines and models."""
    buckets: defaultdict[float, float] = defaultdict(float)
    for sample in page.pick(signal, "bucket"):
        try:
            buckets[float(sample.labels["le"])] += sample.value
        except (KeyError, ValueError) as exc:
            raise PageError(f"bucket of {signal} without a number as le") from exc
    total = _sum(_values(page.pick(signal, "sum")))
    edges = tuple(sorted(buckets))
    cumulative = tuple(buckets[edge] for edge in edges)
    if total is None or not edges or edges[-1] != math.inf or not all(map(math.isfinite, cumulative)):
        return None
    return Histogram(edges=edges, cumulative=cumulative, total=total)
