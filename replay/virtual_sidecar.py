"""What the controller would have seen of a fleet, second by second: the sidecars' own code on a virtual clock.

Each server is scraped once a second, as the plugin would tell it: requests in the engine, finished ones and how each
stood against the objective. `Observer` makes samples of that, with forecasts and calibration; `SampleBook` and
`CostBook` take them as they take those of a live fleet.

The samples are made once and serve every policy. They come from traffic without syncs, but for the beginning: until
``probe_until_s`` a sync runs now and then, so that the calibration learns what one does. Live, the syncs of the policy
itself teach it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controller.costs import CostBook
from controller.policy.base import ServerView
from controller.policy.cost_view import CostView
from controller.samples import SampleBook, SampleOutcome
from replay.service_model import Service, Windows
from sidecar.calibrator import Phase
from sidecar.config import SidecarSettings
from sidecar.observer import Observer
from sidecar.slo import Slo, SloMetric, parse_slo
from sidecar.source.snapshot import EngineSnapshot, Histogram, Judged, ScrapeOutcome, ScrapeResult

ORIGIN_S = 1_700_000_000.0
"""Unix time of the virtual clock's beginning; a whole second, as are the scrapes."""
PROBE_EVERY_S = 30.0
STALE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What the controller knows at one whole second."""

    servers: tuple[ServerView, ...]
    costs: CostView | None


def probes(until_s: float, *, sync_s: float) -> Windows:
    """Syncs on a grid, while the calibration learns."""
    every_s = max(PROBE_EVERY_S, 2 * sync_s)
    return [(start_s, start_s + sync_s) for start_s in np.arange(every_s, until_s - sync_s, every_s)]


def watch(
    services: Sequence[Service],
    *,
    duration_s: int,
    sync_s: float,
    probe_until_s: float,
    slo: str,
    busy_requests: int,
) -> Iterator[Moment]:
    """What is known at each whole second from 0 on, of all before it."""
    samples, costs = SampleBook((), stale_after_s=STALE_AFTER_S), CostBook(stale_after_s=STALE_AFTER_S)
    names = [name_of(index) for index in range(len(services))]
    costs.follow(names, now_s=ORIGIN_S)
    observers = [
        Observer(
            SidecarSettings(vllm="http://127.0.0.1:1", server_id=name, node=name, slo=slo, busy_requests=busy_requests),
            t_s=ORIGIN_S,
            monotonic_s=0.0,
        )
        for name in names
    ]
    windows = probes(probe_until_s, sync_s=sync_s)
    parsed = parse_slo(slo)
    pages = [snapshots(service, duration_s=duration_s, windows=windows, slo=parsed) for service in services]
    syncing = {s for start_s, end_s in windows for s in range(math.floor(start_s) + 1, math.ceil(end_s) + 1)}
    for second in range(duration_s):
        now_s = ORIGIN_S + second
        phase = Phase.SYNC if second in syncing else Phase.NONE
        for observer, server_pages in zip(observers, pages, strict=True):
            page = next(server_pages)
            result = ScrapeResult(ScrapeOutcome.OK, now_s, float(second), 0.0, page)
            verdict = samples.offer(observer.observe(result, phase=phase), now_s)
            assert verdict.outcome is SampleOutcome.ACCEPTED
            assert verdict.sample is not None
            costs.offer(verdict.sample)
        servers = samples.views_beside(((name, name) for name in names), now_s)
        yield Moment(servers, costs.view(names, now_s=now_s, sync_s=sync_s))


def name_of(index: int) -> str:
    return f"server-{index}"


def snapshots(service: Service, *, duration_s: int, windows: Windows, slo: Slo) -> Iterator[EngineSnapshot]:
    """The page of one server at each whole second."""
    slow = np.where(service.in_sync(windows), service.slow, 1.0)
    first_s, end_s = service.arrival_s + slow * service.ttft_s, service.arrival_s + slow * service.e2e_s
    violated_s = np.sort(end_s[service.violated(windows)])
    marks_s = np.arange(duration_s, dtype=float)
    counts = [
        np.searchsorted(np.sort(times_s), marks_s, side="right")
        for times_s in (service.arrival_s, first_s, end_s, violated_s)
    ]
    late_first_s = np.sort(first_s[slow * service.ttft_s > _ttft_limit_s(slo)])
    late = np.searchsorted(late_first_s, marks_s, side="right")
    for second, (arrived, begun, finished, violated) in enumerate(zip(*counts, strict=True)):
        yield EngineSnapshot(
            t_s=ORIGIN_S + second,
            monotonic_s=float(second),
            running=float(arrived - finished),
            waiting=0.0,
            kv_usage_max_frac=0.0,
            steps=float(arrived + finished),
            finished=float(finished),
            ttft=Histogram((_ttft_limit_s(slo), np.inf), (float(begun - late[second]), float(begun)), 0.0),
            judged=Judged(float(finished), float(violated), float(violated)),
            exact=True,
        )


def _ttft_limit_s(slo: Slo) -> float:
    found = [objective.threshold_s for objective in slo.objectives if objective.metric is SloMetric.TTFT]
    return found[0] if found else 1.0
