"""The state of the engine, by table: what each kind of scrape makes of each state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.schema import EngineState
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome, ScrapeResult
from sidecar.source.state import STALL_AFTER_S, EngineStatus, advance, initial_status
from tests.sidecar.helpers import bad, good

STALE_AFTER_S = 3.0
START = initial_status(t_s=0.0, monotonic_s=0.0)


def page(t_s: float, *, running: float | None = 1.0, steps: float | None = 1.0, asleep: bool = False) -> ScrapeResult:
    return good(EngineSnapshot(t_s=t_s, monotonic_s=t_s, running=running, waiting=0.0, steps=steps, asleep=asleep))


def accepting(result: ScrapeResult, *, accepts: bool) -> ScrapeResult:
    return replace(result, accepts=accepts)


def after(*results: ScrapeResult, status: EngineStatus = START) -> EngineStatus:
    for result in results:
        status = advance(status, result, stale_after_s=STALE_AFTER_S)
    return status


OUT, S = ScrapeOutcome, EngineState
TABLE: list[tuple[str, list[ScrapeResult], EngineState]] = [
    ("nothing yet", [], S.STARTING),
    ("refuses from the start", [bad(OUT.REFUSED, t_s=500)], S.STARTING),
    ("first page", [page(1)], S.READY),
    ("refuses after READY", [page(1), bad(OUT.REFUSED, t_s=2)], S.DOWN),
    ("comes back", [page(1), bad(OUT.REFUSED, t_s=2), page(3, steps=0)], S.READY),
    ("one time-out", [page(1), bad(OUT.TIMEOUT, t_s=3)], S.READY),
    ("time-outs for long", [page(1), bad(OUT.TIMEOUT, t_s=3), bad(OUT.TIMEOUT, t_s=5)], S.STALE),
    ("times out after DOWN", [page(1), bad(OUT.REFUSED, t_s=9), bad(OUT.TIMEOUT, t_s=11)], S.STALE),
    ("never answers at all", [bad(OUT.TIMEOUT, t_s=2)], S.STARTING),
    ("never answers for long", [bad(OUT.TIMEOUT, t_s=2), bad(OUT.TIMEOUT, t_s=4)], S.STALE),
    ("broken for long", [page(1), bad(OUT.BROKEN, t_s=5)], S.STALE),
    ("errors for long", [page(1), bad(OUT.HTTP_ERROR, t_s=5)], S.STALE),
    ("garbage for long", [page(1), bad(OUT.MALFORMED, t_s=5)], S.STALE),
    ("recovers from STALE", [page(1), bad(OUT.TIMEOUT, t_s=9), page(10)], S.READY),
    ("answers without series", [bad(OUT.NO_SERIES, t_s=1)], S.METRICS_DISABLED),
    ("series disappear", [page(1), bad(OUT.NO_SERIES, t_s=2)], S.METRICS_DISABLED),
    ("series appear", [bad(OUT.NO_SERIES, t_s=1), page(2)], S.READY),
    ("asleep", [page(1, asleep=True)], S.SLEEPING),
    ("awake again", [page(1, asleep=True), page(2)], S.READY),
    ("flat for less than a minute", [page(1), page(1 + STALL_AFTER_S - 1)], S.READY),
    ("flat for a minute with requests", [page(1), page(30), page(1 + STALL_AFTER_S)], S.STALLED),
    ("flat for long and idle", [page(1, running=0), page(500, running=0)], S.READY),
    ("flat, then a step", [page(1), page(61), page(62, steps=2)], S.READY),
    ("busy after long idleness", [page(1, running=0), page(500, running=0), page(501)], S.READY),
    ("a restart while flat", [page(1), page(61), page(62, steps=0)], S.READY),
    ("no counters of progress", [page(1, steps=None), page(100, steps=None)], S.READY),
    ("says that it takes no requests", [page(1), accepting(page(2), accepts=False)], S.DRAINING),
    ("drains until it says otherwise", [accepting(page(1), accepts=False), page(2)], S.DRAINING),
    ("takes requests again", [accepting(page(1), accepts=False), accepting(page(2), accepts=True)], S.READY),
    ("drains, then refuses", [page(1), accepting(page(2), accepts=False), bad(OUT.REFUSED, t_s=3)], S.DOWN),
    (
        "is another after a drain",
        [page(1), accepting(page(2), accepts=False), bad(OUT.REFUSED, t_s=3), page(4)],
        S.READY,
    ),
    ("drains and sleeps", [accepting(page(1, asleep=True), accepts=False)], S.DRAINING),
    ("cannot be reached for long", [page(1), bad(OUT.UNREACHABLE, t_s=5)], S.STALE),
    ("redirects for long", [page(1), bad(OUT.REDIRECTED, t_s=5)], S.STALE),
    ("wants a token for long", [page(1), bad(OUT.UNAUTHORIZED, t_s=5)], S.STALE),
    ("is too large for long", [page(1), bad(OUT.TOO_LARGE, t_s=5)], S.STALE),
    ("has another certificate for long", [page(1), bad(OUT.TLS, t_s=5)], S.STALE),
    ("gauges missing and flat", [page(1, running=None), page(100, running=None)], S.READY),
]


@pytest.mark.parametrize(("results", "state"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_state(results: list[ScrapeResult], state: EngineState) -> None:
    assert after(*results).state is state


def test_the_state_holds_since_it_changed_last() -> None:
    status = after(page(1), page(2), page(3))
    assert status.since_s == 1
    assert after(bad(OUT.REFUSED, t_s=7), status=status).since_s == 7


def test_a_clock_that_jumps_makes_nothing_stale() -> None:
    late = replace(bad(OUT.TIMEOUT, t_s=90_000), monotonic_s=2.0)
    assert after(page(1), late).state is S.READY
