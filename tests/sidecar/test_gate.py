"""The sidecar's part in the gate: pace, and the load where the server has no plugin."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import httpx
import pytest

from sidecar.app import Sidecar, create_app
from sidecar.config import SidecarSettings
from sidecar.gate import GateKeeper, Order, order_of
from sidecar.pace import Pacer
from sidecar.pace_order import ORDER_FILE, keep_order, read_order
from sidecar.schema import EngineState, Load, LoadSample, PaceMode
from sidecar.vllm_plugin.gate_reader import GateReader, GateReason
from sidecar.vllm_plugin.gate_writer import GateWriter, Heartbeat
from sidecar.vllm_plugin.records import SlotFlag, StepRecord, encode_record
from sidecar.vllm_plugin.step_ring import StepRing
from tests.sidecar.helpers import Upstream, capture, running, serving, until

READY = LoadSample(server_id="s", node="n", t_s=1.0, state=EngineState.READY, running=2, waiting=1)
DOWN = LoadSample(server_id="s", node="n", t_s=1.0, state=EngineState.DOWN)


def order(mode: PaceMode, pressure: float | None, sample: LoadSample | None, *, fresh: bool = True) -> Order:
    pacer = Pacer()
    pacer.advance(pressure, is_exact=False, now_s=0.0)
    return order_of(pacer.pace(mode), sample, is_fresh=fresh)


@pytest.mark.parametrize(
    ("mode", "pressure", "sample", "flags", "pace"),
    [
        (PaceMode.AUTO, 0.25, READY, SlotFlag.SIDECAR | SlotFlag.SCRAPED, 0.75),
        (PaceMode.AUTO, None, DOWN, SlotFlag.SIDECAR, 1.0),
        (PaceMode.AUTO, None, None, SlotFlag.SIDECAR, 1.0),
        (PaceMode.PAUSE, 0.25, READY, SlotFlag.SIDECAR | SlotFlag.SCRAPED, 0.0),
        (PaceMode.RUN, 1.0, READY, SlotFlag.SIDECAR | SlotFlag.SCRAPED | SlotFlag.RUN_ORDERED, 1.0),
    ],
)
def test_the_order_follows_pace_and_load(
    mode: PaceMode, pressure: float | None, sample: LoadSample | None, flags: int, pace: float
) -> None:
    written = order(mode, pressure, sample)
    assert (written.flags, written.pace) == (flags, pace)


def test_a_scrape_that_is_old_says_nothing() -> None:
    assert not order(PaceMode.AUTO, 0.0, READY, fresh=False).flags & SlotFlag.SCRAPED


def test_a_ready_server_without_a_writer_is_told_once_per_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = GateKeeper(tmp_path, scrape_interval_s=1.0)
    pace, start_s = Pacer().pace(PaceMode.AUTO), time.monotonic()

    def told(sample: LoadSample | None, *ticks_s: float) -> list[str]:
        caplog.clear()
        for tick_s in ticks_s:
            keeper.tick(pace, sample, age_s=0.0, now_s=start_s + tick_s)
        return [record.levelname for record in caplog.records if "plugin or middleware writes" in record.getMessage()]

    with caplog.at_level(logging.INFO):
        assert told(None, 0.0, 30.0) == []
        assert told(DOWN, 31.0, 60.0) == []
        assert told(READY, 61.0, 70.5) == []
        assert told(READY, 71.0, 90.0, 200.0) == ["WARNING"]
        assert f"writes in {tmp_path}:" in caplog.text
        assert "WADILOCO_GATE_DIR?" in caplog.text
        assert told(DOWN, 201.0) == told(READY, 202.0, 220.0) == []
        writer = GateWriter(tmp_path, SlotFlag.INGRESS)
        start_s = time.monotonic()
        assert told(READY, 0.0, 0.1) == ["INFO"]
        writer.close()
        assert told(READY, 1.0, 5.0) == []
        assert told(READY, 11.0, 50.0) == ["WARNING"]
    keeper.close()


def test_a_gate_that_cannot_be_written_is_not_called_one_without_writers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    keeper = GateKeeper(tmp_path / "file", scrape_interval_s=1.0)
    for now_s in (0.0, 20.0):
        keeper.tick(Pacer().pace(PaceMode.AUTO), READY, age_s=0.0, now_s=now_s)
    keeper.close()
    assert "gate is off" in caplog.text
    assert "plugin or middleware writes" not in caplog.text


def settings_for(url: str, gate: Path) -> SidecarSettings:
    return SidecarSettings(
        vllm=url, node="host", gate=gate, scrape_interval_s=0.1, scrape_timeout_s=0.5, busy_requests=100
    )


async def load(client: httpx.AsyncClient) -> Load:
    return Load.model_validate_json((await client.get("/v1/load")).text)


def test_without_a_plugin_the_gate_follows_the_scrape_and_says_so(tmp_path: Path) -> None:
    upstream = Upstream(capture("busy"))
    reader = GateReader(tmp_path)

    def reason() -> GateReason:
        return reader.read(time.monotonic()).reason

    async def main() -> None:
        app = create_app(settings_for(upstream.url, tmp_path))
        sidecar: Sidecar = app.state.sidecar
        async with running(app) as client:
            await until(lambda: reason() is GateReason.SCRAPED, "a closed gate")
            upstream.page = capture("idle")
            await until(lambda: reason() is GateReason.IDLE, "an open gate")
            await until(lambda: sidecar.gate is not None and not sidecar.gate.state.busy, "an idle state")
            seen = await load(client)
            assert seen.gate is not None
            assert (seen.source, seen.gate.source, seen.gate.reason) == ("scrape", "scrape", "idle")
            await client.put("/v1/pace", json={"mode": "pause"})
            await until(lambda: reason() is GateReason.NO_PACE, "a gate closed by an order")
            await client.put("/v1/pace", json={"mode": "run"})
            await until(lambda: reason() is GateReason.RUN_ORDERED, "a gate opened by an order")
            await client.put("/v1/pace", json={"mode": "auto"})
            upstream.status = 500
            await until(lambda: reason() is GateReason.NO_WRITER, "an unknown load")
            assert 'wadiloco_sidecar_gate_state{reason="' in (await client.get("/metrics")).text

    with serving(upstream):
        asyncio.run(main())
    assert reason() is GateReason.NO_WRITER
    reader.close()


def test_a_pause_outlives_the_sidecar_that_took_it(tmp_path: Path) -> None:
    upstream = Upstream(capture("idle"))
    reader = GateReader(tmp_path)

    def reason() -> GateReason:
        return reader.read(time.monotonic()).reason

    async def pause() -> None:
        async with running(create_app(settings_for(upstream.url, tmp_path))) as client:
            await until(lambda: reason() is GateReason.IDLE, "an open gate")
            await client.put("/v1/pace", json={"mode": "pause"})
            await until(lambda: reason() is GateReason.NO_PACE, "a gate closed by an order")

    async def resume() -> None:
        async with running(create_app(settings_for(upstream.url, tmp_path))) as client:
            await until(lambda: reason() is GateReason.NO_PACE, "a gate that is still closed")
            assert (await client.get("/v1/pace")).json()["reason"] == "paused"
            await client.put("/v1/pace", json={"mode": "auto"})
            await until(lambda: reason() is GateReason.IDLE, "an open gate")

    async def after() -> None:
        async with running(create_app(settings_for(upstream.url, tmp_path))):
            await until(lambda: reason() is GateReason.IDLE, "an open gate")

    with serving(upstream):
        asyncio.run(pause())
        assert reader.read(time.monotonic()).busy
        assert reader.read(time.monotonic() + 60).reason is GateReason.SIDECAR_DEAD
        asyncio.run(resume())
        asyncio.run(after())
    reader.close()


def test_two_sidecars_on_one_gate_complain(tmp_path: Path) -> None:
    upstream = Upstream(capture("idle"))

    async def both() -> None:
        async with running(create_app(settings_for(upstream.url, tmp_path))) as one:
            async with running(create_app(settings_for(upstream.url, tmp_path))):
                await until_complaint(one, "2 sidecars write this gate")
            await until_complaint(one, None)

    async def until_complaint(client: httpx.AsyncClient, said: str | None) -> None:
        for _ in range(200):
            gate = (await load(client)).gate
            assert gate is not None
            if (gate.error is None) if said is None else (said in (gate.error or "")):
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"no complaint: {said}")

    with serving(upstream):
        asyncio.run(both())


@pytest.mark.parametrize("content", [b"", b"sprint\n", b"\xff" * 1000])
def test_an_order_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ORDER_FILE).write_bytes(content)
    assert read_order(tmp_path) is PaceMode.AUTO


@pytest.mark.parametrize("mode", PaceMode)
def test_an_order_is_kept(tmp_path: Path, mode: PaceMode) -> None:
    keep_order(tmp_path, PaceMode.RUN)
    keep_order(tmp_path, mode)
    assert read_order(tmp_path) is mode


def test_with_plugin_and_middleware_load_and_gate_are_exact(tmp_path: Path) -> None:
    upstream = Upstream(capture("idle"))
    ingress, ring = GateWriter(tmp_path, SlotFlag.INGRESS), StepRing(tmp_path, engine=0, max_num_seqs=64)
    heartbeat = Heartbeat(period_s=0.05)
    heartbeat.add(ingress.beat)
    heartbeat.add(ring.beat)

    async def main() -> None:
        app = create_app(settings_for(upstream.url, tmp_path))
        sidecar: Sidecar = app.state.sidecar
        async with running(app) as client:
            ingress.update(in_flight=2)
            ring.write([encode_record(StepRecord(sequence=1, at_ns=1, step=1, running=2, waiting=0, kv_usage=0.1))])
            await until(lambda: sidecar.gate is not None and sidecar.gate.state.in_flight == 2, "two in flight")
            await until(lambda: sidecar.observer.sample is not None and sidecar.observer.sample.running == 2, "steps")
            seen = await load(client)
            assert seen.gate is not None
            assert (seen.source, seen.max_num_seqs, seen.gate.source) == ("plugin", 64, "ingress")

    with serving(upstream):
        asyncio.run(main())
    heartbeat.stop()
    ingress.close()
    ring.close()


def test_a_gate_that_cannot_be_written_is_told_and_hurts_nothing(tmp_path: Path) -> None:
    upstream = Upstream(capture("idle"))
    (tmp_path / "file").write_text("")

    async def main() -> None:
        app = create_app(settings_for(upstream.url, tmp_path / "file"))
        async with running(app) as client:
            await until(lambda: app.state.sidecar.observer.sample is not None, "a sample")
            seen = await load(client)
            assert seen.gate is not None
            assert seen.gate.busy
            assert seen.gate.error

    with serving(upstream):
        asyncio.run(main())
