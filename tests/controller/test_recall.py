"""After a restart the headroom and the costs know what was before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller import recall as recall_module
from controller.costs import CostBook, ServerCosts, learn
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


@pytest.mark.parametrize("num_groups", [1, 3])
def test_every_group_learns_from_the_past(num_groups: int) -> None:
    book, now_s = CostBook(stale_after_s=5.0), START_S + 310
    names = [f"vllm-{number}" for number in range(num_groups)]
    for name in names:
        book.view([name], now_s=START_S + 300, sync_s=2.0)
        for second in range(300, 310):
            book.offer(LoadSample.model_validate(told(START_S + second + 1, 1.0, name)))
        book.view([name], now_s=now_s, sync_s=2.0)
    book.recall({name: costs_of(*range(300), cost=9.0) for name in names}, now_s=now_s)
    for name in names:
        past = book.known_past([name])
        assert (past.first, past.costs) == (int(START_S), (9.0,) * 300 + (1.0,) * 10)
        # Seconds that come while it learns are seen once, by the track that is adopted.
        book.offer(LoadSample.model_validate(told(START_S + 311, 2.0, name)))
        book.view([name], now_s=now_s + 1, sync_s=2.0)
        book.adopt([name], learn(past, sync_s=2.0), until=past.until, now_s=now_s + 1)
        seen = book.view([name], now_s=now_s + 1, sync_s=2.0)
        assert seen is not None
        assert len(seen.recent_per_s) == 311


def test_what_is_learned_from_the_past_is_what_would_have_been_learned_then() -> None:
    costs = [float(second % 7 == 0) * 3.0 for second in range(400)]
    through = CostBook(stale_after_s=5.0)
    through.follow(["a"], now_s=START_S)
    for second, cost in enumerate(costs):
        through.offer(LoadSample.model_validate(told(START_S + second + 1, cost, "a")))
        before = through.view(["a"], now_s=START_S + second + 1, sync_s=2.0)
    again = CostBook(stale_after_s=5.0)
    server = ServerCosts()
    for second, cost in enumerate(costs):
        server.add(LoadSample.model_validate(told(START_S + second + 1, cost, "a")))
    again.recall({"a": server}, now_s=START_S + 400)
    # The newest sample is one that has come since the start.
    again.offer(LoadSample.model_validate(told(START_S + 400, costs[-1], "a")))
    past = again.known_past(["a"])
    again.adopt(["a"], learn(past, sync_s=2.0), until=past.until, now_s=START_S + 400)
    after = again.view(["a"], now_s=START_S + 400, sync_s=2.0)
    assert before is not None
    assert after is not None
    assert after.recent_per_s == before.recent_per_s
    assert after.expected_per_s == before.expected_per_s
    assert after.decorrelation_s == before.decorrelation_s


def test_a_past_that_is_unknown_teaches_nothing() -> None:
    book = CostBook(stale_after_s=5.0)
    assert book.known_past(["a"]).costs == ()
    book.follow(["a", "b"], now_s=START_S)
    book.recall({"a": costs_of(1, 2, 5, cost=1.0)}, now_s=START_S + 6)
    book.offer(LoadSample.model_validate(told(START_S + 8, 1.0, "a")))
    assert book.known_past(["a", "b"]).costs == ()
    assert book.known_past(["a"]).costs == (1.0, 1.0, None, None, 1.0, None, 1.0)


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


@pytest.mark.parametrize("mode", ["synchronous", "per_island"])
def test_after_a_restart_the_group_of_every_island_knows_what_was_before(tmp_path: Path, mode: str) -> None:
    clock, islands = ManualClock(), 3
    settings = make_settings(tmp_path, lease_timeout_s=600, num_slots=islands, mode=mode)
    together = tuple(f"vllm-{number}" for number in range(islands))
    groups = [together] if mode == "synchronous" else [(name,) for name in together]

    told_since_s: list[float] = []

    async def tell(client: Client) -> None:
        clock.advance(1.0)
        told_since_s.append(clock())
        body = {"samples": [told(clock(), 1.0, name) for name in together]}
        assert (await client.http.post("/v1/samples", json=body)).json()["accepted"] == islands

    async def before(client: Client) -> None:
        for number in range(islands):
            await client.register(f"island-{number}", server_id=f"vllm-{number}", node=f"host-{number}")
        for _ in range(120):
            await tell(client)

    async def after(client: Client) -> None:
        async def learned() -> bool:
            await tell(client)
            costs = client.controller.state.costs
            seen = [costs.view(group, now_s=clock(), sync_s=2.0) for group in groups]
            return all(one is not None and len(one.recent_per_s) > len(told_since_s) + 100 for one in seen)

        await until(learned, "that every group knows the costs before the restart")

    play(settings, clock, before)
    clock.advance(2)
    told_since_s.clear()
    play(settings, clock, after)
