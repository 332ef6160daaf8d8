"""What the answers of a server mean for the sidecar (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from sidecar.doctor_checks import Check, Finding, Status, count, printable
from sidecar.doctor_evidence import ServerEvidence
from sidecar.slo import Slo
from sidecar.slo.judge import nearest_edges
from sidecar.source.signals import ALIASES, HISTOGRAM_ALIASES, NEEDED_SIGNALS
from sidecar.source.snapshot import EngineSnapshot, Histogram, ScrapeOutcome, ScrapeResult

LOOP_SHARE = 0.05
"""A scrape occupies the server's event loop about as long as it takes: at most this share of its time goes to it."""
SHORTEST_INTERVAL_S = 0.1
DEFAULT_INTERVAL_S = 1.0
TRIED_VERSION = "0.32."
BLIND = {
    "running": "load", "waiting": "load", "kv_usage": "KV pressure", "steps": "a stalled engine",
    "finished": "finished requests", "generation_tokens": "token throughput", "ttft": "arrivals and TTFT",
    "itl": "inter-token latency", "e2e": "request latency",
}  # fmt: skip
"""Signal → what cannot be seen without it."""


def judge_server(server: ServerEvidence, slo: Slo, *, has_plugin: bool) -> Iterator[Finding]:
    yield _reachable(server)
    if not server.results:
        return
    if server.version is not None:
        yield _version(printable(server.version, 40))
    if server.results[0].outcome is ScrapeOutcome.NO_SERIES:
        first = server.results[0]
        yield Finding(Check.METRICS, Status.FAIL, printable(first.detail), first.remedy)
    pages = [result.snapshot for result in server.results if result.snapshot is not None]
    if not pages:
        return
    yield _signals(pages[-1], slo)
    for metric, threshold_s in thresholds(slo):
        yield _edges(pages[-1], metric, threshold_s, has_plugin=has_plugin)
    yield _scrape_cost(server.results)
    yield _engine(pages)
    yield _processes(pages[-1])


def _reachable(server: ServerEvidence) -> Finding:
    if server.resolve_error:
        remedy = "check the host name in --vllm, and this host's DNS"
        return Finding(Check.REACHABLE, Status.FAIL, printable(server.resolve_error), remedy)
    first = server.results[0]
    if first.outcome in (ScrapeOutcome.OK, ScrapeOutcome.NO_SERIES):
        secure = " over TLS" if server.url.startswith("https") else ""
        return Finding(Check.REACHABLE, Status.OK, f"/metrics of {server.url} answered{secure}")
    return Finding(
        Check.REACHABLE,
        Status.FAIL,
        f"{first.outcome}: {printable(first.detail)}".rstrip(": "),
        first.remedy,
    )


def _version(version: str) -> Finding:
    if version.startswith(TRIED_VERSION):
        return Finding(Check.VERSION, Status.OK, f"vLLM {version}")
    return Finding(
        Check.VERSION, Status.OK, f"vLLM {version}; tried was {TRIED_VERSION}x: see the signals for what this one lacks"
    )


def _signals(page: EngineSnapshot, slo: Slo) -> Finding:
    names = {**ALIASES, **HISTOGRAM_ALIASES}
    missing = [name for name in NEEDED_SIGNALS if page.signals.get(name) is None]
    renamed = {
        name: series
        for name, series in page.signals.items()
        if series is not None and len(names.get(name, ())) > 1 and not series.endswith(names[name][0])
    }
    details = {"signals": dict(page.signals), "missing": missing}
    known = sum(series is not None for series in page.signals.values())
    said = f"{known} of {len(page.signals)} found"
    said += "".join(f"; {name} as {series}" for name, series in renamed.items())
    if not missing:
        return Finding(Check.SIGNALS, Status.OK, said, details=details)
    blind = ", ".join(dict.fromkeys(BLIND.get(name, name) for name in missing))
    is_fatal = bool({"running", "waiting", *(metric for metric, _ in thresholds(slo))} & set(missing))
    return Finding(
        Check.SIGNALS,
        Status.FAIL if is_fatal else Status.WARN,
        f"{said}; missing {', '.join(missing)}: blind to {blind}",
        "use a vLLM that exports them, or install the plugin, which counts them itself",
        details,
    )


def thresholds(slo: Slo) -> list[tuple[str, float]]:
    """The latencies that are judged, each with its threshold in seconds."""
    return [(objective.metric.value, objective.threshold_s) for objective in slo.objectives]


def _edges(page: EngineSnapshot, metric: str, threshold_s: float, *, has_plugin: bool) -> Finding:
    histogram: Histogram | None = getattr(page, metric, None)
    said = as_text(metric, threshold_s)
    if histogram is None:
        return Finding(
            Check.SLO, Status.FAIL, f"no histogram of {metric}: {said} cannot be judged",
            "choose an objective on a latency that the server exports",
        )  # fmt: skip
    below_s, above_s = nearest_edges(histogram.edges, threshold_s)
    details = {"below_s": below_s, "above_s": above_s if math.isfinite(above_s) else None}
    if below_s == above_s:
        return Finding(Check.SLO, Status.OK, f"{said} is on a bucket edge: violations are exact", details=details)
    nearest = " and ".join(as_text(metric, edge) for edge in (below_s, above_s) if 0 < edge < math.inf)
    message = f"{said} is between bucket edges; the nearest are {nearest}"
    if has_plugin:
        return Finding(Check.SLO, Status.OK, f"{message}; the plugin makes violations exact", details=details)
    return Finding(
        Check.SLO, Status.WARN, f"{message}: violations are bounds",
        "choose one of them, or install the plugin, which judges exactly", details,
    )  # fmt: skip


def as_text(metric: str, threshold_s: float) -> str:
    return f"{metric}:{threshold_s * 1e3:.10g}ms"


def _scrape_cost(results: tuple[ScrapeResult, ...]) -> Finding:
    good_s = [result.duration_s for result in results if result.outcome is ScrapeOutcome.OK]
    failed = [result for result in results if result.outcome is not ScrapeOutcome.OK]
    median_s, longest_s = statistics.median(good_s), max(good_s)
    interval_s = bearable_interval_s(median_s)
    details = {"median_s": median_s, "longest_s": longest_s, "interval_s": interval_s, "failed": len(failed)}
    message = (
        f"a scrape takes {median_s * 1e3:.0f} ms, at most {longest_s * 1e3:.0f} ms: bears one per {interval_s:g} s"
    )
    if failed:
        message += f"; {len(failed)} of {len(results)} failed ({failed[-1].outcome})"
    if failed or interval_s > DEFAULT_INTERVAL_S or longest_s > DEFAULT_INTERVAL_S / 2:
        interval_s = max(interval_s, DEFAULT_INTERVAL_S)
        timeout_s = math.ceil(max(2 * longest_s, 1.0))
        remedy = f"set --scrape-interval-s {interval_s:g} --scrape-timeout-s {timeout_s} on the sidecar"
        return Finding(Check.SCRAPE, Status.WARN, message, remedy, details)
    return Finding(Check.SCRAPE, Status.OK, message, details=details)


def bearable_interval_s(scrape_s: float) -> float:
    """Shortest interval at which scrapes of this length take `LOOP_SHARE` of the server's event loop, in tenths."""
    return max(math.ceil(round(scrape_s / LOOP_SHARE * 10, 6)) / 10, SHORTEST_INTERVAL_S)


def _engine(pages: list[EngineSnapshot]) -> Finding:
    first, last = pages[0], pages[-1]
    watched_s = last.monotonic_s - first.monotonic_s
    if last.asleep:
        return Finding(
            Check.ENGINE, Status.WARN, "asleep: it serves nothing until woken", "POST /wake_up to the server"
        )
    if any(a is not None and b is not None and b < a for a, b in zip(first.progress, last.progress, strict=True)):
        return Finding(
            Check.ENGINE, Status.WARN, "counters went back while they were watched: it restarted, or several servers "
            "answer under this URL", "give the URL of one server, not of a load balancer",
        )  # fmt: skip
    if first.progress != last.progress:
        steps = (last.steps or 0.0) - (first.steps or 0.0)
        tokens = (last.generation_tokens or 0.0) - (first.generation_tokens or 0.0)
        return Finding(
            Check.ENGINE, Status.OK, f"works: {steps:.0f} steps and {tokens:.0f} tokens in {watched_s:.1f} s"
        )
    if len(pages) < 2 or last.in_engine is None:
        return Finding(
            Check.ENGINE, Status.WARN, "whether it works cannot be told", "run the doctor again, under traffic"
        )
    if last.in_engine > 0:
        return Finding(
            Check.ENGINE, Status.WARN, f"{last.in_engine:.0f} requests in the engine, and no step in {watched_s:.1f} s",
            "a long prefill, or a frozen engine: run the doctor again with --watch-s 60, and look at vLLM's log",
        )  # fmt: skip
    return Finding(Check.ENGINE, Status.OK, "idle: no request in it, so no counter moves")


def _processes(page: EngineSnapshot) -> Finding:
    shared = page.process_start_s is None and page.created_s is None
    servers = "several API servers, or Prometheus multiprocess mode" if shared else "one API server"
    details = {"engines": page.num_engines, "multiprocess": shared}
    return Finding(Check.PROCESSES, Status.OK, f"{count(page.num_engines, 'engine')}, {servers}", details=details)
