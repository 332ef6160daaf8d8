"""Two engines (data parallel) behind two API servers: one page and one gate tell of all of them.

The tests go on with one server in their order; the last one ends it.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replay.processes import Children
from replay.vllm_server import START_DEADLINE_S, cores_for
from sidecar.schema import EngineState, LoadSample
from sidecar.slo import parse_slo
from sidecar.source.parse import PageParser
from sidecar.source.ring import RingSource
from sidecar.source.snapshot import EngineSnapshot
from sidecar.source.window import difference
from sidecar.vllm_plugin.gate_reader import GateReader, GateReason
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.records import SlotFlag
from tests.conftest import ROOT, VLLM, require_vllm
from tests.integration.helpers import eventually
from tests.integration.servers import LiveServer, LiveSidecar, stopped

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(600)]

NUM_ENGINES = 2
NUM_API_SERVERS = 2
OPTIONS = ("--data-parallel-size", str(NUM_ENGINES), "--api-server-count", str(NUM_API_SERVERS))
API_SERVER = "VLLM::APIServer"
NUM_LONG = 4
PATIENT = ("--scrape-interval-s", "0.5", "--scrape-timeout-s", "5", "--scrape-interval-max-s", "10")
"""A page that API servers add up from each other's files takes over a second where engines leave them no core."""


@dataclass(frozen=True)
class Layout:
    """The server, a sidecar that has the plugin, and one that has the page alone."""

    server: LiveServer
    exact: LiveSidecar
    scraped: LiveSidecar


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    require_vllm()
    children, logs = Children(), tmp_path_factory.mktemp("layout")
    binding = "|".join(str(core) for core in cores_for(NUM_ENGINES))
    server = LiveServer(
        children,
        logs,
        core=None,
        options=OPTIONS,
        env={"VLLM_CPU_OMP_THREADS_BIND": binding, "OMP_NUM_THREADS": "1"},
        vllm=replace(VLLM, serve_script=ROOT / "deploy" / "local" / "vllm_serve.py"),
    )
    try:
        server.start(deadline_s=2 * START_DEADLINE_S)  # eight processes import vLLM
        exact = LiveSidecar(children, server.url, logs, *PATIENT, gate=server.gate)
        yield Layout(server, exact, LiveSidecar(children, server.url, logs, *PATIENT))
    finally:
        children.stop()
        server.close()


def test_engines_that_never_stepped_are_idle_although_the_page_lacks_their_gauges(layout: Layout) -> None:
    layout.scraped.becomes(EngineState.READY)
    # Prometheus' multiprocess mode leaves a gauge out until it is set.
    assert "vllm:num_requests_running{" not in layout.server.metrics().text
    for sidecar in (layout.scraped, layout.exact):
        sample = sidecar.sees(running=0).sample
        assert sample is not None
        assert sample.waiting == 0
        assert sample.pressure_frac is not None
    layout.server.becomes(GateReason.IDLE)


def test_requests_of_either_engine_close_the_gate_and_it_opens_after(layout: Layout) -> None:
    server, seen = layout.server, set[int]()
    with closing(GateReader(server.gate, sources=SlotFlag.ENGINE)) as engines:
        for _ in range(10):
            server.rests()
            with server.unfinished():
                assert server.state().busy
                assert engines.read(time.monotonic()).busy
                seen |= set(running_engines(server))
            if len(seen) == NUM_ENGINES:
                break
    assert seen == {0, 1}
    assert server.rests().in_flight == 0


def test_loads_of_all_engines_add_up_and_kv_usage_does_not(layout: Layout) -> None:
    server = layout.server
    server.rests()
    with server.unfinished(count=NUM_LONG):
        state = server.becomes(GateReason.IN_FLIGHT)
        assert (state.in_flight, state.running) == (NUM_LONG, NUM_LONG)
        # Which API server takes a connection is the kernel's choice.
        in_flight = [slot.in_flight for slot in server.slots() if slot.flags == SlotFlag.INGRESS]
        assert (len(in_flight), sum(in_flight)) == (NUM_API_SERVERS, NUM_LONG)
        # An engine's gauges move with its next step, and reach the page through either API server.
        text, page = eventually(
            lambda: seen if (seen := page_of(server))[1].running == NUM_LONG else None, what="all requests on the page"
        )
        running, usage = per_engine(text, "vllm:num_requests_running"), per_engine(text, "vllm:kv_cache_usage_perc")
        assert (page.num_engines, page.running, len(running)) == (NUM_ENGINES, NUM_LONG, NUM_ENGINES)
        assert min(running.values()) > 0
        assert page.kv_usage_mean_frac == pytest.approx(sum(usage.values()) / NUM_ENGINES)
        assert page.kv_usage_max_frac == max(usage.values()) > 0
        for sidecar in (layout.exact, layout.scraped):
            assert sidecar.sees(running=NUM_LONG).state is EngineState.READY
    assert server.rests().in_flight == 0
    for sidecar in (layout.exact, layout.scraped):
        sidecar.sees(running=0)


def test_tokens_and_requests_of_all_processes_are_in_the_sums(layout: Layout) -> None:
    server = layout.server
    server.rests()
    with closing(RingSource(server.gate, parse_slo("ttft:1000s,tpot:1000s,e2e:1000s"))) as rings:
        before = (steps_of(rings), page_of(server)[1])
        for _ in range(8):
            server.ask(max_tokens=16).raise_for_status()
        server.rests()
        after = (steps_of(rings), page_of(server)[1])
    assert len(after[0].writers) == NUM_ENGINES * NUM_API_SERVERS
    for first, last in zip(before, after, strict=True):
        gained = difference(first, last)
        assert gained is not None
        assert (gained.arrivals, gained.finished, gained.generation_tokens) == (8, 8, 8 * 16)
        assert gained.itl is not None
        assert gained.itl.count == 8 * 15


def test_an_api_server_that_hangs_closes_the_gate_and_brings_no_leap_when_it_is_back(layout: Layout) -> None:
    server = layout.server
    server.rests()
    rested_s = time.time()
    eventually(
        lambda: [s for s in samples(layout, since_s=rested_s) if begins_after(s, rested_s)], what="no old request"
    )
    hung = server.processes(API_SERVER)[0]
    began_s = time.time()
    with stopped(hung):
        assert server.becomes(GateReason.WRITER_SILENT).busy
        eventually(lambda: dropped(layout, since_s=began_s), what="an interval dropped")
        woken_s = time.time()
    server.becomes(GateReason.IDLE)
    eventually(lambda: dropped(layout, since_s=woken_s), what="an interval dropped")
    eventually(lambda: [s for s in samples(layout, since_s=woken_s) if s.interval_s is not None], what="an interval")
    counted = [s.finished for s in samples(layout, since_s=began_s) if s.finished is not None]
    assert set(counted) == {0}
    assert {s.state for s in samples(layout, since_s=began_s)} == {EngineState.READY}


def test_an_api_server_that_dies_takes_the_server_along_and_leaves_no_count(layout: Layout) -> None:
    server = layout.server
    server.rests()
    with server.unfinished(count=NUM_LONG):
        os.kill(server.processes(API_SERVER)[0], signal.SIGKILL)
        assert server.becomes(GateReason.NO_WRITER).busy
    assert server.state().in_flight is None
    server.end()
    layout.exact.becomes(EngineState.DOWN)
    layout.scraped.becomes(EngineState.DOWN)
    with closing(GateWriter(server.gate, SlotFlag.INGRESS)):
        assert server.becomes(GateReason.IDLE).in_flight == 0


def page_of(server: LiveServer) -> tuple[str, EngineSnapshot]:
    answer, now_s = server.metrics(), time.monotonic()
    parser = PageParser("vllm:")
    page = parser.parse(answer.text, content_type=answer.headers["content-type"], t_s=now_s, monotonic_s=now_s)
    assert page is not None
    return answer.text, page


def per_engine(text: str, name: str) -> dict[str, float]:
    """Values of a gauge by engine, read by somebody else's parser."""
    values: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                values[sample.labels["engine"]] += sample.value
    return values


def steps_of(rings: RingSource) -> EngineSnapshot:
    now_s = time.monotonic()
    steps = rings.read(t_s=now_s, monotonic_s=now_s)
    assert steps is not None
    return steps


def running_engines(server: LiveServer) -> list[int]:
    return [slot.engine for slot in server.slots() if slot.flags == SlotFlag.ENGINE and slot.running]


def samples(layout: Layout, *, since_s: float) -> list[LoadSample]:
    return [sample for sample in layout.exact.load(window_s=300).window if sample.t_s > since_s]


def begins_after(sample: LoadSample, t_s: float) -> bool:
    return sample.interval_s is not None and sample.t_s - sample.interval_s > t_s


def dropped(layout: Layout, *, since_s: float) -> list[LoadSample]:
    return [sample for sample in samples(layout, since_s=since_s) if sample.interval_s is None]
