"""What the rows say of large fleets, of one server, and of nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.dashboard import picture
from controller.dashboard.picture import take_picture
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, sample


def test_of_a_large_fleet_the_unknown_and_the_busiest_servers_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "MAX_SERVER_ROWS", 3)

    async def body(client: Client) -> None:
        samples = [sample(f"vllm-{number}", pressure_frac=number / 10) for number in range(9)]
        samples.append(sample("mute", pressure_frac=None))
        await client.http.post("/v1/samples", json={"samples": samples})
        seen = take_picture(client.controller)
        assert set(seen.servers) == {"mute", "vllm-8", "vllm-7"}
        assert (seen.totals.servers, seen.totals.server_rows, seen.totals.servers_unknown) == (10, 3, 1)
        found = await client.get("/v1/fleet/rows", contains="VLLM-1")
        assert [row["server_id"] for row in found["servers"]] == ["vllm-1"]
        assert (found["servers_found"], found["islands_found"]) == (1, 0)
        few = await client.get("/v1/fleet/rows", contains="vllm", limit=2)
        assert (len(few["servers"]), few["servers_found"]) == (2, 9)

    play(make_settings(tmp_path), ManualClock(), body)


def test_of_many_agents_the_lost_come_first_then_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_ISLAND_ROWS", 2)
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register("lost")
        clock.advance(12)
        client.controller.state.registry.expire(clock())
        for name in ("spare-b", "island-c", "island-d"):
            await client.register(name)
        seen = take_picture(client.controller)
        assert "lost" in seen.islands
        assert (seen.totals.agents, seen.totals.island_rows) == (4, 2)
        assert [seen.islands[name].slot for name in seen.islands if name != "lost"] == [1]

    play(make_settings(tmp_path, num_slots=3), clock, body)


def test_the_history_of_a_server_has_its_bins_and_its_forecast(tmp_path: Path) -> None:
    forecast = [{"horizon_s": 5.0, "arrivals_per_s": 2, "arrivals_per_s_q10": 1, "arrivals_per_s_q50": 2}]

    async def body(client: Client) -> None:
        points = [point | {"arrivals_per_s_q90": 4} for point in forecast]
        samples = [
            sample("rack/1:a", t_s=START_S - 15, running=1, waiting=0),
            sample("rack/1:a", running=2, waiting=1, arrivals=4, interval_s=2.0, forecast=points),
        ]
        await client.http.post("/v1/samples", json={"samples": samples})
        told = await client.get("/v1/history", server_id="rack/1:a")
        assert [b["in_engine"] for b in told["bins"]] == [1, 3]
        assert told["bins"][1]["arrivals_per_s"] == 2
        assert (told["forecast_t_s"], told["forecast"][0]["arrivals_per_s_q90"]) == (START_S, 4)
        refused = await client.http.get("/v1/history", params={"server_id": "nobody"})
        assert (refused.status_code, refused.json()["field"]) == (422, "server_id")

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_forecast_holds_until_the_next_one_comes_or_it_is_old(tmp_path: Path) -> None:
    clock = ManualClock()
    point = {"horizon_s": 5.0, "arrivals_per_s": 2, "arrivals_per_s_q10": 1, "arrivals_per_s_q50": 2}

    async def forecast_after(client: Client, wait_s: float, **fields: object) -> tuple[float | None, int]:
        clock.advance(wait_s)
        await client.http.post("/v1/samples", json={"samples": [sample("a", t_s=clock(), **fields)]})
        told = await client.get("/v1/history", server_id="a")
        return told["forecast_t_s"], len(told["forecast"])

    async def body(client: Client) -> None:
        full = [point | {"arrivals_per_s_q90": 4}]
        assert await forecast_after(client, 0) == (None, 0)
        assert await forecast_after(client, 1, forecast=full) == (START_S + 1, 1)
        assert await forecast_after(client, 4) == (START_S + 1, 1)
        assert await forecast_after(client, 1, forecast=full * 2) == (START_S + 6, 2)
        assert await forecast_after(client, 14) == (START_S + 6, 2)
        assert await forecast_after(client, 2) == (None, 0)

    play(make_settings(tmp_path), clock, body)


def test_slo_counts_are_unknown_until_a_sample_tells_them(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        told = {"slo_requests": 20, "slo_violations": 2, "slo_target_frac": 0.99}
        await client.http.post("/v1/samples", json={"samples": [sample("quiet"), sample("vllm-0", **told)]})
        rows = take_picture(client.controller).servers
        assert (rows["quiet"].slo_requests_5m, rows["quiet"].slo_target_frac) == (None, None)
        assert (rows["vllm-0"].slo_requests_1m, rows["vllm-0"].slo_violations_5m) == (20, 2)

    play(make_settings(tmp_path), ManualClock(), body)
