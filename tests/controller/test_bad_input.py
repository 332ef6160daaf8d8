"""What a broken or hostile sidecar, agent or client sends, over HTTP: refused with a counted reason, and survived."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from controller.app import MAX_BODY_BYTES
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress, sample, until

JSON = {"Content-Type": "application/json"}


async def offer(client: Client, *samples: Any) -> list[str]:
    """Reasons of the refused ones."""
    raw = json.dumps({"samples": samples})
    answer = await client.http.post("/v1/samples", content=raw, headers=JSON)
    assert answer.status_code == 200, answer.text
    receipt = answer.json()
    assert receipt["accepted"] + len(receipt["rejected"]) == len(samples)
    assert all(one["detail"] for one in receipt["rejected"])
    return [one["reason"] for one in receipt["rejected"]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"t_s": START_S + 6}, "from_future"),
        ({"t_s": 1e300}, "from_future"),
        ({"t_s": START_S - 61}, "too_old"),
        ({"t_s": 0}, "too_old"),
        ({"running": 1e300}, "absurd"),
        ({"waiting": 1e9}, "absurd"),
        ({"arrivals": 1e18, "interval_s": 0.001}, "absurd"),
        ({"arrivals": 1e18, "interval_s": 1e300}, "absurd"),
        ({"generation_tokens": 1e30, "interval_s": 1.0}, "absurd"),
        ({"e2e_mean_s": 1e9}, "absurd"),
        ({"slo_violations": 1e12}, "absurd"),
        ({"sync_cost_per_s": 1e12}, "absurd"),
        ({"sync_costs_ahead": [{"start_s": 0, "violations": 1e300}]}, "absurd"),
        ({"sync_costs_ahead": [{"start_s": 0, "violations": 1}] * 2000}, "absurd"),
        ({"running": -1}, "invalid"),
        ({"running": float("nan")}, "invalid"),
        ({"pressure_frac": float("inf")}, "invalid"),
        ({"pressure_frac": 1.01}, "invalid"),
        ({"node": "=cmd()"}, "invalid"),
        ({"server_id": "a b"}, "invalid"),
        ({"state": "fine"}, "invalid"),
        ({"interval_s": 0}, "invalid"),
    ],
)
def test_a_sample_that_cannot_be_true_is_refused_counted_and_kept_nowhere(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    async def body(client: Client) -> None:
        assert await offer(client, sample(**fields), sample("vllm-1")) == [reason]
        assert await client.metric(f'wadiloco_controller_samples_total{{outcome="{reason}"}}') == 1
        assert [server["server_id"] for server in (await client.get("/v1/fleet"))["servers"]] == ["vllm-1"]
        assert (await client.http.get("/v1/export/samples.csv")).text.count("\r\n") == 2

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize(
    "fields",
    [
        {"running": 5000, "waiting": 90_000, "arrivals": 3e5, "interval_s": 1.0},
        {"arrivals": 1e6, "interval_s": 0.001},
        {"generation_tokens": 5e8, "prompt_tokens": 5e9, "interval_s": 60.0},
        {"e2e_mean_s": 86_400.0},
    ],
)
def test_a_very_busy_server_is_believed(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def body(client: Client) -> None:
        assert await offer(client, sample(**fields)) == []

    play(make_settings(tmp_path), ManualClock(), body)


def test_repeated_and_disordered_samples_are_told_apart(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        batch = [sample(t_s=START_S + 2), sample(t_s=START_S + 2), sample(t_s=START_S + 1), sample(t_s=START_S + 3)]
        assert await offer(client, *batch) == ["duplicate", "out_of_order"]
        assert await offer(client, *batch) == ["out_of_order", "out_of_order", "out_of_order", "duplicate"]
        assert (await client.http.get("/v1/export/samples.csv")).text.count("\r\n") == 3

    play(make_settings(tmp_path), ManualClock(), body)


async def pieces(num_bytes: int, sent: list[int]) -> AsyncIterator[bytes]:
    piece = b" " * (1 << 20)
    for _ in range(num_bytes // len(piece)):
        sent.append(len(piece))
        yield piece


def test_a_batch_that_announces_too_much_is_refused_unread(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        sent: list[int] = []
        headers = {**JSON, "Content-Length": str(100 << 20)}
        answer = await client.http.post("/v1/samples", content=pieces(100 << 20, sent), headers=headers)
        assert (answer.status_code, answer.json()["remedy"]) == (413, "send smaller batches")
        assert sum(sent) <= 1 << 20
        series = 'wadiloco_controller_refused_requests_total{family="samples",status="413"}'
        assert await client.metric(series) == 1

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_batch_that_goes_on_and_on_is_refused_at_the_bound(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        sent: list[int] = []
        answer = await client.http.post("/v1/samples", content=pieces(100 << 20, sent), headers=JSON)
        assert answer.status_code == 413
        assert sum(sent) <= MAX_BODY_BYTES + (2 << 20)
        series = 'wadiloco_controller_refused_requests_total{family="samples",status="413"}'
        assert await client.metric(series) == 1

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"\xff\xfe", 422),
        (b'{"samples": 7}', 422),
        (b'{"samples": [' + b"[" * 100_000, 422),
        (b'{"samples": [' + b"[" * 100 + b"]" * 100 + b"]}", 200),
        (json.dumps({"samples": [1] * 20_001}).encode(), 422),
        (json.dumps({"samples": [1] * 20_000}).encode(), 200),
    ],
)
def test_bodies_that_are_no_batch_are_refused_and_the_next_is_taken(
    tmp_path: Path, content: bytes, status: int
) -> None:
    async def body(client: Client) -> None:
        answer = await client.http.post("/v1/samples", content=content, headers=JSON)
        assert answer.status_code == status, answer.text[:200]
        series = f'wadiloco_controller_refused_requests_total{{family="samples",status="{status}"}}'
        assert await client.metric(series) == (1 if status >= 400 else None)
        assert await offer(client, sample()) == []

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_made_up_fleet_of_names_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.samples.MAX_SERVERS", 3)
    monkeypatch.setattr("controller.registry.MAX_AGENTS", 3)

    async def body(client: Client) -> None:
        reasons = await offer(client, *(sample(f"vllm-{index}") for index in range(5)))
        assert reasons == ["too_many_servers"] * 2
        for index in range(3):
            await client.register(f"agent-{index}")
        request = {"agent_id": "agent-3", "instance": "x", "node": "host-a"}
        refused = await client.http.post("/v1/agents", json=request)
        assert (refused.status_code, refused.json()["field"]) == (409, "agent_id")

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_zombie_is_refused_whatever_it_says(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register("first")
        await client.beat("first", epoch=1, progress=progress(5, step=100))
        clock.advance(20.5)

        async def taken() -> bool:
            return (await client.register("second")).slot == 0

        await until(taken, "the slot")
        for epoch in (1, 2, 99, 10**6):
            assert (await client.try_beat("first", epoch=epoch, progress=progress(9, step=200))).status_code == 409
        assert (await client.http.delete("/v1/agents/first", params={"instance": "first"})).status_code == 409
        assert (await client.register("second")).slot == 0
        assert await client.metric('wadiloco_controller_reports_total{outcome="refused"}') == 4

    play(make_settings(tmp_path), clock, body)


def test_a_journal_that_is_damaged_in_mid_run_is_told_and_views_of_memory_go_on(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        assert await offer(client, sample()) == []
        path = tmp_path / "journal.sqlite"

        async def is_all_in_the_file() -> bool:
            with closing(sqlite3.connect(path)) as other:
                busy, *_ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not busy

        await until(is_all_in_the_file, "nothing beside the file")
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(size - 4096))
        for view in ("/v1/recoveries?since=0", "/v1/decisions?since=0", "/v1/export/samples.csv"):
            answer = await client.http.get(view)
            assert (answer.status_code, answer.json().get("field")) == (503, "--journal"), (view, answer.text[:200])
        assert (await client.get("/v1/fleet"))["servers"][0]["server_id"] == "vllm-0"
        await client.beat(epoch=1, progress=progress(5))
        assert (await client.http.get("/healthz")).status_code == 200

    # No tick meanwhile: what it writes lies beside the damaged file, and can be read.
    play(make_settings(tmp_path, tick_s=10.0, stale_after_s=30.0), ManualClock(), body)
