"""What Prometheus meets at ``/metrics``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from controller.handover import ControlOutcome
from controller.samples import SampleOutcome
from tests.controller.helpers import Client, ManualClock, make_settings, play, progress, report, sample

PROMTOOL = shutil.which("promtool")


async def busy(client: Client) -> None:
    """Something of everything that is counted."""
    await client.register()
    await client.register("spare")
    await client.beat(epoch=1, progress=progress(5))
    await client.beat(epoch=1, syncs=[report(autonomous=True)], progress=progress(0, step=1001, round=1))
    await client.http.post("/v1/samples", json={"samples": [sample(), sample(), 7]})
    await client.http.post("/v1/control", json={"action": "swap", "slot": 0, "when": "now"})
    await client.http.post("/v1/control", json={"action": "drain", "slot": 9})
    await client.http.get("/v1/export/samples.csv")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")
@pytest.mark.parametrize("accept", ["text/plain", "text/plain;version=0.0.4"])
def test_promtool_finds_nothing_to_say(tmp_path: Path, accept: str) -> None:
    async def body(client: Client) -> None:
        await busy(client)
        page = (await client.http.get("/metrics", headers={"Accept": accept})).text
        pages.append(page)

    pages: list[str] = []
    play(make_settings(tmp_path, budget_syncs=5), ManualClock(), body)
    assert PROMTOOL is not None
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=pages[0], capture_output=True, text=True, timeout=30, check=False
    )
    assert "wadiloco_controller_export_rows_total" in pages[0]
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_what_is_counted_says_why(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await busy(client)
        for series, value in {
            'samples_total{outcome="duplicate"}': 1,
            'samples_total{outcome="invalid"}': 1,
            'rounds_total{outcome="applied"}': 1,
            'recoveries_total{kind="swapped"}': 1,
            'recoveries_total{kind="spare_took_slot"}': 1,
            'control_actions_total{action="swap",outcome="done"}': 1,
            'control_actions_total{action="drain",outcome="refused"}': 1,
            'export_rows_total{format="csv",table="samples"}': 1,
            "islands_without_server": 0,
            "agents_drained": 0,
        }.items():
            assert await client.metric(f"wadiloco_controller_{series}") == value, series

    play(make_settings(tmp_path), ManualClock(), body)


def test_labels_are_a_closed_set() -> None:
    assert {outcome.value for outcome in ControlOutcome} == {"done", "dry_run", "refused", "cancelled"}
    assert "absurd" in {outcome.value for outcome in SampleOutcome}
