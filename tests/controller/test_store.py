"""The controller's rendezvous store."""

from __future__ import annotations

from pathlib import Path

from tests.controller.helpers import Client, ManualClock, make_settings, play


def test_groups_meet_at_the_controller_and_old_epochs_are_refused(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        group = {"group": "run-1/slot-0"}
        await client.http.put("/v1/store/7/rank/0", params=group, content=b"address")
        assert (await client.http.get("/v1/store/7/rank/0", params=group)).content == b"address"
        assert (await client.http.put("/v1/store/8/rank/0", params=group, content=b"new")).status_code == 204
        answer = await client.http.get("/v1/store/7/rank/0", params=group)
        assert (answer.status_code, answer.json()["field"]) == (409, "epoch")

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_restarted_controller_has_an_empty_store(tmp_path: Path) -> None:
    async def fill(client: Client) -> None:
        await client.http.put("/v1/store/7/a", content=b"x")

    async def look(client: Client) -> None:
        assert (await client.http.get("/v1/store/6/a")).status_code == 204

    play(make_settings(tmp_path), ManualClock(), fill)
    play(make_settings(tmp_path), ManualClock(), look)
