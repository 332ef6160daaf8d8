"""Refused requests are counted by what they wanted, and nobody makes up labels."""

from __future__ import annotations

from pathlib import Path

from controller.refusals import FAMILIES
from tests.controller.helpers import Client, ManualClock, make_settings, play


def test_every_route_has_its_family(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        paths = (await client.get("/openapi.json"))["paths"]
        assert {path.split("/")[2] for path in paths if path.startswith("/v1/")} == FAMILIES

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_path_that_is_no_route_counts_as_another(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        for path in ("/v1/made-up", "/made-up", "/v1/experiments/7"):
            await client.http.get(path)
        text = (await client.http.get("/metrics")).text
        assert 'refused_requests_total{family="other",status="404"} 2.0' in text
        assert 'refused_requests_total{family="experiments",status="404"} 1.0' in text
        assert "made-up" not in text

    play(make_settings(tmp_path), ManualClock(), body)
