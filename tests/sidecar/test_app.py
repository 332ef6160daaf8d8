"""The whole sidecar in one process, against a real HTTP server that restarts, hangs and lies."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from diloco.phase import PhaseTeller
from diloco.trainer_schema import TrainerPhase
from sidecar.app import Sidecar, create_app
from sidecar.config import SidecarSettings
from sidecar.schema import Calibration, EngineState, Forecast, Load, Pace, SloReport
from tests.sidecar.helpers import Upstream, capture, edited, running, serving, until, without


@pytest.fixture
def upstream() -> Upstream:
    return Upstream(capture("busy"))


@pytest.fixture
def server(upstream: Upstream) -> Iterator[Upstream]:
    with serving(upstream):
        yield upstream


def settings_for(url: str, **values: Any) -> SidecarSettings:
    fast: dict[str, Any] = {"scrape_interval_s": 0.1, "scrape_timeout_s": 0.5, "push_interval_s": 0.1}
    return SidecarSettings(vllm=url, node="host", slo="e2e:300ms", **{**fast, **values})


def sidecar_of(app: FastAPI) -> Sidecar:
    sidecar: Sidecar = app.state.sidecar
    return sidecar


def run(settings: SidecarSettings, body: Callable[[httpx.AsyncClient, Sidecar], Awaitable[None]]) -> None:
    async def main() -> None:
        app = create_app(settings)
        async with running(app) as client:
            await body(client, sidecar_of(app))

    asyncio.run(main())


async def reached(sidecar: Sidecar, state: EngineState) -> None:
    await until(
        lambda: sidecar.observer.sample is not None and sidecar.observer.status.state is state, f"state {state}"
    )


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Own metrics by name and labels."""
    text = (await client.get("/metrics")).text
    return {
        s.name.removeprefix("wadiloco_sidecar_") + "".join(f" {v}" for _, v in sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_load_forecast_and_slo_of_a_busy_server(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        server.page = capture("busy-1s-later")
        await until(lambda: sidecar.observer.slo_requests_total == 13, "the second page")
        load = Load.model_validate((await client.get("/v1/load", params={"window_s": 60})).json())
        assert load.state is EngineState.READY
        assert load.signals["running"] == "vllm:num_requests_running"
        assert load.age_s is not None
        assert load.age_s < 5
        assert sum(sample.arrivals or 0 for sample in load.window) == 12
        forecast = Forecast.model_validate((await client.get("/v1/forecast")).json())
        assert [point.horizon_s for point in forecast.points] == [1, 2, 5, 10, 15, 30, 60]
        one = Forecast.model_validate((await client.get("/v1/forecast", params={"horizon_s": 7})).json())
        assert [point.horizon_s for point in one.points] == [7]
        slo = SloReport.model_validate((await client.get("/v1/slo")).json())
        assert (slo.exact, slo.windows[0].requests) == (True, 13)

    run(settings_for(server.url), body)


def test_calibration_and_sync_costs_of_a_busy_server(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        empty = Calibration.model_validate((await client.get("/v1/calibration")).json())
        assert set(empty.phases) == {"none", "inner", "sync"}
        server.page = capture("busy-1s-later")
        await until(lambda: sidecar.observer.slo_requests_total == 13, "the second page")
        calibration = Calibration.model_validate((await client.get("/v1/calibration?sync_duration_s=2")).json())
        assert sum(bin_.requests for bin_ in calibration.phases["none"]) == pytest.approx(13)
        assert [cost.start_s for cost in calibration.sync_costs] == [0, 1, 2, 5, 10, 15, 30, 60]
        # 12 or more arrivals per second, two seconds, and a sync that was never seen.
        assert calibration.sync_costs[0].violations > 1
        assert (await gauges(client))["calibration_requests none"] == pytest.approx(13)

    run(settings_for(server.url), body)


def test_what_the_trainer_does_is_charged_for_what_happens(server: Upstream, tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        trainer = PhaseTeller(tmp_path)
        trainer.enter(TrainerPhase.SYNC)
        await until(lambda: sidecar.trainers is not None and sidecar.trainers.take() == "sync", "the sync")
        server.page = capture("busy-1s-later")
        while sidecar.observer.slo_requests_total < 13:
            trainer.beat()
            await asyncio.sleep(0.02)
        trainer.beat()
        sample = sidecar.observer.window(since_monotonic_s=0.0)
        assert [s.trainer_phase for s in sample if s.slo_requests] == ["sync"]
        calibration = Calibration.model_validate((await client.get("/v1/calibration")).json())
        assert {name: sum(b.requests for b in bins) for name, bins in calibration.phases.items()} == {
            "none": 0,
            "inner": 0,
            "sync": pytest.approx(13),
        }
        load = Load.model_validate((await client.get("/v1/load")).json())
        assert load.trainer is not None
        assert (load.trainer.num_trainers, load.trainer.phase) == (1, "sync")
        values = await gauges(client)
        assert values["trainers"] == 1
        assert values["trainer_phase_seconds_total sync"] > 0
        assert values["trainer_phase_seconds_total inner"] == 0
        trainer.close()

    run(settings_for(server.url, gate=tmp_path), body)


def test_samples_tell_what_a_trainer_may_do_after_them(server: Upstream, tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await until(lambda: sidecar.observer.sample is not None and sidecar.observer.sample.pace is not None, "a pace")
        load = Load.model_validate((await client.get("/v1/load?window_s=60")).json())
        pace = Pace.model_validate((await client.get("/v1/pace")).json())
        assert load.sample is not None
        assert load.sample == load.window[-1]
        assert (load.sample.pace, load.sample.slo_target_frac) == (pace.pace, sidecar.settings.objective.target_frac)
        assert load.sample.gate_busy is not None
        assert load.sample.gate_reason
        await client.put("/v1/pace", json={"mode": "pause"})
        await until(lambda: sidecar.observer.sample is not None and sidecar.observer.sample.pace == 0, "the pause")

    run(settings_for(server.url, gate=tmp_path), body)


def test_without_a_gate_nobody_tells_the_phase(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        load = Load.model_validate((await client.get("/v1/load")).json())
        assert load.trainer is None
        assert load.sample is not None
        assert load.sample.trainer_phase is None
        assert (load.sample.pace, load.sample.gate_busy, load.sample.gate_reason) == (None, None, None)
        assert not [name for name in await gauges(client) if name.startswith("trainer")]

    run(settings_for(server.url), body)


def test_what_was_learned_survives_a_restart(server: Upstream, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    settings = settings_for(server.url, state_file=path)

    async def learn(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        server.page = capture("busy-1s-later")
        await until(lambda: sidecar.observer.slo_requests_total == 13, "the second page")

    async def restart(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        assert sidecar.observer.num_observations > 0
        await reached(sidecar, EngineState.READY)
        forecast = Forecast.model_validate((await client.get("/v1/forecast")).json())
        assert len(forecast.points) == 7
        assert forecast.points[0].method is not None

    run(settings, learn)
    run(settings, restart)


def test_a_state_file_that_cannot_be_used_is_a_cold_start(server: Upstream, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("something else")
    os.mkfifo(tmp_path / "state.json.new")  # In nobody's way: the save at the end would wait for it.

    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await until(lambda: sidecar.observer.num_observations > 0, "an interval")
        assert (await client.get("/healthz")).status_code == 200

    run(settings_for(server.url, state_file=path), body)
    assert path.read_text().startswith('{"format":"wadiloco-sidecar-1"')


def test_a_state_file_that_cannot_be_written_is_counted(server: Upstream, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    sidecars = []

    async def body(_: httpx.AsyncClient, sidecar: Sidecar) -> None:
        sidecars.append(sidecar)
        await until(lambda: sidecar.observer.num_observations > 0, "an interval")
        folder.rmdir()

    run(settings_for(server.url, state_file=folder / "state.json"), body)
    registry = sidecars[0].metrics.registry
    assert registry.get_sample_value("wadiloco_sidecar_state_write_failures_total") == 1


@pytest.mark.parametrize(
    "path",
    [
        "/v1/forecast?horizon_s=0",
        "/v1/forecast?horizon_s=61",
        "/v1/forecast?horizon_s=x",
        "/v1/load?window_s=-1",
        "/v1/calibration?sync_duration_s=0",
    ],
)
def test_a_wrong_query_is_refused_by_name(server: Upstream, path: str) -> None:
    async def body(client: httpx.AsyncClient, _: Sidecar) -> None:
        response = await client.get(path)
        assert response.status_code == 422
        assert response.json()["field"].startswith("query.")

    run(settings_for(server.url), body)


def test_pace_follows_the_load_and_obeys_an_order(server: Upstream, tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        assert Pace.model_validate((await client.get("/v1/pace")).json()).pace == 0.0
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        auto = Pace.model_validate((await client.get("/v1/pace")).json())
        assert 0.5 < auto.pace <= 0.75
        assert (await client.put("/v1/pace", json={"mode": "pause"})).json()["pace"] == 0.0
        assert (await client.put("/v1/pace", json={"mode": "run"})).json()["pace"] == 1.0
        assert (await client.put("/v1/pace", json={"mode": "sprint"})).status_code == 422
        assert (await client.put("/v1/pace", json={"mode": "auto"})).json()["reason"] == "pressure"
        server.page = edited(server.page, {"vllm:num_requests_running": 8})
        await until(lambda: sidecar.pace().pace == 0.0, "pace of a full server")

    run(settings_for(server.url, gate=tmp_path), body)


def test_without_a_gate_an_order_is_refused_because_nobody_would_hear_it(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, _: Sidecar) -> None:
        for mode in ("pause", "run"):
            answer = await client.put("/v1/pace", json={"mode": mode})
            assert (answer.status_code, answer.json()["field"]) == (409, "mode")
            assert "--gate" in answer.json()["remedy"]
        assert (await client.put("/v1/pace", json={"mode": "auto"})).status_code == 200

    run(settings_for(server.url), body)


def test_health_depends_on_neither_server_nor_controller() -> None:
    nowhere = f"http://127.0.0.1:{unused_port()}"

    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await until(lambda: sidecar.num_queued() >= 3, "samples that wait for the controller")
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        load = Load.model_validate((await client.get("/v1/load")).json())
        assert load.state is EngineState.STARTING
        assert load.sample is not None
        assert load.sample.pressure_frac is None
        assert load.signals == {}

    run(settings_for(nowhere, controller=nowhere), body)


def test_a_server_that_is_killed_and_comes_back_is_seen_each_time(upstream: Upstream) -> None:
    port = unused_port()

    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.STARTING)
        with serving(upstream, port=port):
            await reached(sidecar, EngineState.READY)
        await reached(sidecar, EngineState.DOWN)
        assert "running_requests" not in await gauges(client)
        upstream.page = capture("idle")
        with serving(upstream, port=port):
            await reached(sidecar, EngineState.READY)
            await until(lambda: sidecar.observer.num_restarts == 1, "the restart")
            assert (await gauges(client))["running_requests"] == 0

    run(settings_for(f"http://127.0.0.1:{port}"), body)


def test_a_server_that_hangs_is_stale_and_not_down(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)
        server.hang.set()
        await reached(sidecar, EngineState.STALE)
        values = await gauges(client)
        assert values["scrapes_total timeout"] >= 1
        assert values["engine_state stale"] == 1
        assert values["load_unknown"] == 1
        assert values["pace_ratio"] == 0
        server.hang.clear()
        server.released.set()
        await reached(sidecar, EngineState.READY)

    run(settings_for(server.url, scrape_timeout_s=0.2), body)


def test_disabled_metrics_and_garbage_have_names_of_their_own(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        page = server.page
        await reached(sidecar, EngineState.READY)
        server.page = without(page, "vllm:")
        await reached(sidecar, EngineState.METRICS_DISABLED)
        server.page = "vllm:num_requests_running{\n"
        await reached(sidecar, EngineState.STALE)
        server.page = page
        await reached(sidecar, EngineState.READY)
        values = await gauges(client)
        assert values["scrapes_total no_series"] >= 1
        assert values["scrapes_total malformed"] >= 1
        assert (await client.get("/healthz")).status_code == 200

    run(settings_for(server.url, scrape_timeout_s=0.2), body)


def test_a_missing_signal_is_an_alarm_in_load_and_metrics(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        assert not [name for name in await gauges(client) if name.startswith("signal_")]
        await reached(sidecar, EngineState.READY)
        assert (await gauges(client))["signal_missing kv_usage"] == 0
        server.page = server.page.replace("vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_ratio")
        await until(lambda: sidecar.observer.missing == ("kv_usage",), "the alarm")
        values = await gauges(client)
        assert (values["signal_missing kv_usage"], values["signal_missing running"]) == (1, 0)
        assert values["signal_series vllm:num_requests_running running"] == 1
        load = Load.model_validate((await client.get("/v1/load")).json())
        assert load.missing_signals == ("kv_usage",)
        assert load.signals["kv_usage"] is None
        server.page = capture("busy").replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        await until(lambda: not sidecar.observer.missing, "the end of the alarm")
        assert (await gauges(client))["signal_series vllm:gpu_cache_usage_perc kv_usage"] == 1

    run(settings_for(server.url), body)


def test_a_server_that_takes_no_requests_drains_and_is_said_to(server: Upstream) -> None:
    server.health_status = 503

    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.DRAINING)
        values = await gauges(client)
        assert (values["engine_state draining"], values["load_unknown"], values["pace_ratio"]) == (1, 1, 0)
        server.health_status = 200
        await reached(sidecar, EngineState.READY)

    run(settings_for(server.url), body)


def test_a_slow_server_is_scraped_more_seldom_until_it_is_fast_again(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)
        server.delay_s = 0.25
        await until(lambda: sidecar.scrape_interval_s == 1.0, "the longest interval")
        assert (await gauges(client))["scrape_interval_seconds"] == 1.0
        load = Load.model_validate((await client.get("/v1/load")).json())
        assert load.scrape is not None
        assert (load.scrape.outcome, load.scrape.interval_s) == ("ok", 1.0)
        assert load.scrape.duration_s >= 0.25
        server.delay_s = 0.0
        await until(lambda: sidecar.scrape_interval_s < 1.0, "a shorter interval")

    run(settings_for(server.url, scrape_interval_s=0.2, scrape_interval_max_s=1.0, scrape_timeout_s=2.0), body)


@pytest.mark.parametrize(
    ("status", "outcome", "said"),
    [
        (401, "unauthorized", "HTTP 401; set --vllm-token-file"),
        (404, "http_error", "HTTP 404; point --vllm at vLLM itself"),
    ],
)
def test_what_failed_is_said_with_the_remedy(server: Upstream, status: int, outcome: str, said: str) -> None:
    server.status = status

    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await until(lambda: sidecar.scrape is not None, "a scrape")
        load = Load.model_validate((await client.get("/v1/load")).json())
        assert load.scrape is not None
        assert load.scrape.outcome == outcome
        assert load.scrape.detail.startswith(said)

    run(settings_for(server.url), body)


def test_own_metrics_say_what_is_known(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        before = await gauges(client)
        assert "pressure_ratio" not in before
        assert {name for name in before if name.startswith("slo_")} == {
            "slo_requests_total", "slo_violations_total", "slo_violations_upper_total",
            "slo_target_ratio", "slo_objective_seconds e2e",
        }  # fmt: skip
        assert before["engine_state starting"] == 1
        await reached(sidecar, EngineState.READY)  # a sample alone may tell of a scrape that failed
        server.page = capture("busy-1s-later")
        await until(lambda: sidecar.observer.slo_requests_total == 13, "the second page")
        values = await gauges(client)
        assert values["running_requests"] == 1
        assert values["waiting_requests"] == 0
        assert values["engine_state ready"] == 1
        assert values["slo_requests_total"] == 13
        assert values["slo_violations_total"] == values["slo_violations_upper_total"]
        assert (values["slo_target_ratio"], values["slo_objective_seconds e2e"]) == (0.99, 0.3)
        assert values["slo_attainment_ratio lower 60s"] == values["slo_attainment_ratio upper 3600s"]
        assert values["slo_objective_attainment_ratio lower e2e 60s"] == values["slo_attainment_ratio lower 60s"]
        assert values["slo_error_budget_left_ratio upper 300s"] == pytest.approx(1 - values["slo_burn_rate lower 300s"])
        assert values["slo_goodput_requests_per_second upper 60s"] > 0
        assert 0 < values["pressure_ratio"] < 1
        assert values["forecast_arrivals_per_second 5 0.9"] >= values["forecast_arrivals_per_second 5 0.5"]
        assert values["scrapes_total ok"] >= 2

    run(settings_for(server.url), body)


def test_a_failure_of_the_sidecar_itself_is_counted_and_survived(
    server: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)
        observe = sidecar.observer.observe
        monkeypatch.setattr(sidecar.observer, "observe", None)
        server_requests = server.num_requests
        await until(lambda: server.num_requests >= server_requests + 3, "three more scrapes")
        monkeypatch.setattr(sidecar.observer, "observe", observe)
        assert (await gauges(client))["scrapes_total internal"] >= 1
        assert (await client.get("/healthz")).status_code == 200

    run(settings_for(server.url), body)


def test_the_token_guards_the_interface_and_never_reaches_the_server(server: Upstream) -> None:
    async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
        await reached(sidecar, EngineState.READY)
        assert (await client.get("/v1/load")).status_code == 401
        assert (await client.get("/v1/load", headers={"Authorization": "Bearer secret"})).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert "Authorization" not in server.headers

    run(settings_for(server.url, token=SecretStr("secret")), body)


def test_a_base_path_is_kept(upstream: Upstream) -> None:
    with serving(upstream):

        async def body(client: httpx.AsyncClient, sidecar: Sidecar) -> None:
            await reached(sidecar, EngineState.STALE)
            assert (await gauges(client))["scrapes_total http_error"] >= 1

        run(settings_for(upstream.url + "/elsewhere", scrape_timeout_s=0.1), body)


def test_every_route_is_documented_with_a_summary(server: Upstream) -> None:
    paths = create_app(settings_for(server.url)).openapi()["paths"]
    assert {"/v1/load", "/v1/forecast", "/v1/slo", "/v1/pace", "/v1/calibration"} <= set(paths)
    assert all(operation["summary"] for path in paths.values() for operation in path.values())


@pytest.mark.parametrize("model", ["SloReport", "SloObjective", "SloWindow", "ObjectiveWindow"])
def test_the_slo_report_is_documented_with_examples(server: Upstream, model: str) -> None:
    properties = create_app(settings_for(server.url)).openapi()["components"]["schemas"][model]["properties"]
    lists = {"objectives", "windows"}
    assert all("examples" in field for name, field in properties.items() if name not in lists)
