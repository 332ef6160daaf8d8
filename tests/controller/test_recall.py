"""After a restart the headroom and the costs know what was before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller import recall as recall_module
from controller.costs import CostBook, ServerCosts
from controller.journal import Journal
from controller.journal_reader import Reader
from controller.recall import read_past
from sidecar.schema import LoadSample
from tests.controller.conftest import Place
from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress, sample, until


def told(t_s: float, cost: float, server_id: str = "vllm-0") -> dict[str, Any]:
    return sample(server_id, t_s, interval_s=1.0, sync_cost_per_s=cost)


def costs_of(*seconds: int, cost: float) -> ServerCosts:
    server = ServerCosts()
    for second in seconds:
        server.add(LoadSample.model_validate(told(START_S + second + 1, cost)))
    return server


def series(server: ServerCosts, first: int, end: int) -> list[float | None]:
    return [server.cost_per_s(int(START_S) + second) for second in range(first, end)]


@pytest.mark.parametrize("kept", ["before", "overlap", "empty"])
def test_what_was_before_fills_what_is_unknown_and_nothing_else(kept: str) -> None:
    present = costs_of(*{"before": (5, 6), "overlap": (2, 3, 6), "empty": ()}[kept], cost=9.0)
    present.recall(costs_of(0, 1, 2, 3, cost=1.0))
    expected: dict[str, list[float | None]] = {
        "before": [1.0, 1.0, 1.0, 1.0, None, 9.0, 9.0],
        "overlap": [1.0, 1.0, 9.0, 9.0, None, None, 9.0],
        "empty": [1.0, 1.0, 1.0, 1.0, None, None, None],
    }
    assert series(present, 0, 7) == expected[kept]


def test_a_past_of_another_day_leaves_nothing_behind() -> None:
    present = costs_of(10_000, 10_001, cost=9.0)
    present.recall(costs_of(0, 1, cost=1.0))
    assert series(present, 10_000 - 1797, 10_002) == [None] * 1797 + [9.0, 9.0]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_one_group_learns_from_the_past_and_many_do_not_hold_up_a_tick(num_groups: int) -> None:
    book, now_s = CostBook(stale_after_s=5.0), START_S + 310
    names = [f"vllm-{number}" for number in range(num_groups)]
    for name in names:
        book.view([name], now_s=START_S + 300, sync_s=2.0)
        for second in range(300, 310):
            book.offer(LoadSample.model_validate(told(START_S + second + 1, 1.0, name)))
        book.view([name], now_s=now_s, sync_s=2.0)
    book.recall({name: costs_of(*range(300), cost=9.0) for name in names}, now_s=now_s)
    seen = book.view(names[:1], now_s=now_s, sync_s=2.0)
    assert seen is not None
    assert len(seen.recent_per_s) == (310 if num_groups == 1 else 10)


def test_the_past_is_read_in_slices_of_the_servers_that_matter(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_module, "SLICE_ROWS", 7)
    monkeypatch.setattr(recall_module, "PAUSE_S", 0.0)
    journal = Journal(place.open_store())
    for second in range(40):
        for name in ("vllm-0", "other"):
            one = LoadSample.model_validate(told(START_S + second + 1, float(second), name))
            journal.append("samples", (name, one.t_s, one.model_dump_json(exclude_none=True)))
    journal.append("samples", ("vllm-0", START_S + 41, "{}"))
    journal.close()

    def read(reader: Reader, since_s: float) -> dict[str, ServerCosts]:
        return asyncio.run(read_past(reader, {"vllm-0"}, since_s=since_s, until_s=START_S + 100))

    past = read(place.reader(), START_S + 10.5)
    assert set(past) == {"vllm-0"}
    assert series(past["vllm-0"], 8, 40) == [None, None, *map(float, range(10, 40))]
    monkeypatch.setattr(recall_module, "MAX_ROWS", 21)
    assert series(read(place.reader(), START_S)["vllm-0"], 28, 40) == [None, None, *map(float, range(30, 40))]
    assert read(place.reader(), START_S + 1000) == {}


def test_a_restart_loses_no_cost(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, lease_timeout_s=600)

    async def before(client: Client) -> None:
        await client.register(server_id="vllm-0")
        await client.beat(epoch=1, progress=progress(1))
        for second in range(60):
            clock.advance(1.0)
            body = {"samples": [told(clock(), float(second))]}
            assert (await client.http.post("/v1/samples", json=body)).json()["accepted"] == 1

    async def after(client: Client) -> None:
        async def known() -> bool:
            costs = client.controller.state.costs.series(["vllm-0"], since_s=START_S, until_s=START_S + 60)
            return costs == tuple(map(float, range(60)))

        await until(known, "what syncs cost before the restart")

    play(settings, clock, before)
    clock.advance(5)
    play(settings, clock, after)
