"""An island that knows two controllers, of which one leads and one dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.controller.postgres import Server

pytestmark = pytest.mark.integration

Run = Callable[..., Any]
Serve = Callable[..., str]


def test_an_island_keeps_its_slot_and_syncs_through_the_next_controller(
    serve: Serve, run_service: Run, run_island: Run, postgres_server: Server, tmp_path: Path
) -> None:
    options = (
        *("--port", "0", "--journal", postgres_server.url(postgres_server.make_database())),
        *("--synchronizer-url", serve(tmp_path / "sync", quorum=1), "--num-slots", "1", "--tick-s", "0.1"),
        *("--policy", "fixed_h", "--policy-params", '{"h": 100}', "--min-h", "8", "--max-h", "100000"),
        *("--failover-s", "1"),
    )
    first = run_service("controller", *options)
    first.until(lambda: first.get("/readyz").status_code == 200)
    second = run_service("controller", *options)
    second.until(lambda: second.get("/readyz").status_code == 503)
    # The standby first: its 503 is what sends the island on.
    island = run_island("--controller", f"{second.url},{first.url}", "--agent-id", "island-0")
    island.until_progress(lambda p: p.round >= 1)
    first.kill()
    second.until(lambda: second.get("/readyz").status_code == 200)
    rounds = island.progress().round
    island.until_progress(lambda p: p.round >= rounds + 2)
    assert island.status().slot == 0
    assert "autonomous=True" not in island.log()
    directed = second.until(
        lambda: [r for r in second.get("/v1/rounds").json()["rounds"] if r["slots_applied"] and r["round"] >= rounds]
    )
    assert all(one["decision_id"] is not None for one in directed)
    assert second.get("/v1/islands").json()[0]["alive"]
