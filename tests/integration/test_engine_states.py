"""What sidecar and gate say of a real server that sleeps, freezes, hangs, or exports no metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from replay.processes import Children
from replay.vllm_server import cores_for
from sidecar.schema import EngineState
from sidecar.source.state import STALL_AFTER_S
from sidecar.vllm_plugin.gate_reader import GateReader, GateReason
from tests.integration.helpers import eventually
from tests.integration.servers import LiveServer, LiveSidecar, stopped

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(600)]

NO_PLUGIN = {"VLLM_PLUGINS": "none"}
"""A stat logger that comes by plugin turns the metrics on again, whatever ``--disable-log-stats`` says."""
LATE_PAGE_S = 3.0
"""How old the last page may have been when the engine froze."""


@pytest.fixture
def scraped_gate(tmp_path: Path) -> Path:
    """Folder of a gate that nobody in the server's processes writes."""
    return tmp_path / "scraped"


@pytest.fixture
def exact(server: LiveServer, children: Children, tmp_path: Path) -> LiveSidecar:
    """A sidecar that has the plugin."""
    sidecar = LiveSidecar(children, server.url, tmp_path, gate=server.gate)
    eventually(lambda: sidecar.load().source == "plugin", what="exact load")
    return sidecar


@pytest.fixture
def scraped(server: LiveServer, children: Children, tmp_path: Path, scraped_gate: Path) -> LiveSidecar:
    """A sidecar that has the metrics page alone."""
    sidecar = LiveSidecar(children, server.url, tmp_path, gate=scraped_gate)
    sidecar.becomes(EngineState.READY)
    return sidecar


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server without metrics; it starts while other tests wait for something."""
    children = Children()
    logs = tmp_path_factory.mktemp("silent")
    server = LiveServer(children, logs, core=cores_for(2)[1], options=("--disable-log-stats",), env=NO_PLUGIN)
    try:
        server.begin()
        yield server
    finally:
        children.stop()
        server.close()


def test_a_sleeping_server_is_asleep_and_what_comes_meanwhile_closes_its_gate(
    server: LiveServer, exact: LiveSidecar, scraped: LiveSidecar
) -> None:
    server.post("/sleep?level=1")
    for sidecar in (exact, scraped):
        sample = sidecar.becomes(EngineState.SLEEPING).sample
        assert sample is not None
        assert (sample.pressure_frac, sample.forecast) == (None, ())
    server.becomes(GateReason.IDLE)
    with server.asking() as answer:
        server.becomes(GateReason.IN_FLIGHT)
        assert exact.becomes(EngineState.SLEEPING).sample
        server.post("/wake_up")
        assert answer.result().is_success
    for sidecar in (exact, scraped):
        sidecar.becomes(EngineState.READY)
    server.rests()


def test_a_server_whose_process_hangs_is_stale_and_its_gate_closed(server: LiveServer, exact: LiveSidecar) -> None:
    with stopped(server.pid):
        assert server.becomes(GateReason.WRITER_SILENT).busy
        load = exact.becomes(EngineState.STALE)
        assert load.sample is not None
        assert load.sample.pressure_frac is None
    exact.becomes(EngineState.READY)
    server.rests()


@pytest.mark.usefixtures("silent")
def test_a_frozen_engine_is_stalled_after_a_minute_and_the_gate_stays_closed(
    server: LiveServer, exact: LiveSidecar, scraped: LiveSidecar, scraped_gate: Path
) -> None:
    (engine,) = server.processes("VLLM::EngineCore")
    sidecars = (exact, scraped)
    with server.asking(max_tokens=4000) as answer:
        eventually(lambda: server.state().running, what="a running request")
        with stopped(engine):
            stopped_s = time.time()
            for sidecar in sidecars:
                sidecar.sees(running=1)

            def are_stalled() -> bool:
                assert server.state().busy
                return all(sidecar.load().state is EngineState.STALLED for sidecar in sidecars)

            eventually(are_stalled, deadline_s=STALL_AFTER_S + 60.0, what="two stalled engines")
            for sidecar in sidecars:
                assert sidecar.load().since_s - stopped_s > STALL_AFTER_S - LATE_PAGE_S
            assert server.metrics().is_success
            with closing(GateReader(scraped_gate)) as reader:
                eventually(lambda: not reader.read(time.monotonic()).is_known, what="unknown load")
                assert reader.read(time.monotonic()).busy
        for sidecar in sidecars:
            sidecar.becomes(EngineState.READY)
        assert answer.result().is_success
    server.rests()


def test_a_server_without_metrics_is_called_so_and_its_gate_works(
    silent: LiveServer, children: Children, tmp_path: Path
) -> None:
    silent.wait()
    sidecar = LiveSidecar(children, silent.url, tmp_path, gate=silent.gate)
    load = sidecar.becomes(EngineState.METRICS_DISABLED)
    assert load.sample is not None
    assert (load.sample.running, load.sample.pressure_frac, load.source) == (None, None, "scrape")
    with silent.asking(max_tokens=900) as answer:
        silent.becomes(GateReason.IN_FLIGHT)
        assert answer.result().is_success
    state = silent.becomes(GateReason.IDLE)
    assert (state.source, state.in_flight) == ("ingress", 0)
