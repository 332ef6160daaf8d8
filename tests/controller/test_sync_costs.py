"""From the samples of a sidecar to the terms of a decision, in a controller in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.controller.helpers import START_S, Client, ManualClock, make_settings, play, progress, sample, until


def with_costs(second: int, cost: float) -> dict[str, Any]:
    ahead = [{"start_s": float(start_s), "violations": cost} for start_s in (0, 1, 2, 5, 10)]
    return sample(t_s=START_S + second, interval_s=1.0, sync_cost_per_s=cost, sync_costs_ahead=ahead)


def test_a_decision_says_what_a_sync_would_have_cost(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path, policy="wa_forecast", policy_params={}, budget_syncs_per_hour=60.0)

    async def body(client: Client) -> None:
        await client.register(server_id="vllm-0")
        await client.beat(epoch=1, progress=progress(1))
        for second in range(1, 31):
            clock.advance(1.0)
            await client.beat(epoch=1, progress=progress(1))
            posted = await client.http.post("/v1/samples", json={"samples": [with_costs(second, 3.0 + second % 3)]})
            assert posted.json()["accepted"] == 1
            await until(lambda: decided_at(client, clock.now_s), "a decision about this second")
        page = await client.get("/v1/decisions", limit=1)
        (last,) = page["decisions"]
        # Under min_h the guard decides; the rule says all the same what it would have gone by.
        assert last["reason"] == "below_min_h"
        assert last["terms"]["sync_cost"] > 2.0
        assert last["terms"]["price"] > 2.0
        assert 0 < last["terms"]["quantile"] < 1
        assert (await client.get("/v1/budget"))["spec"]["syncs_per_hour"] == 60.0

    play(settings, clock, body)


async def decided_at(client: Client, now_s: float) -> bool:
    found = (await client.get("/v1/decisions", limit=1))["decisions"]
    return bool(found) and found[-1]["t_s"] >= now_s


def test_before_islands_and_samples_the_cost_is_unknown(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(10))
        clock.advance(1.0)
        await until(lambda: decided_at(client, clock.now_s), "a decision")
        (last,) = (await client.get("/v1/decisions", limit=1))["decisions"]
        assert last["reason"] == "cost_unknown"

    play(make_settings(tmp_path, policy="wa_forecast", policy_params={}), clock, body)


def test_a_rate_gives_islands_alone_its_period_as_their_gap(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        lease = await client.register()
        assert (lease.autonomy.max_syncs, lease.autonomy.min_gap_s) == (None, 90.0)

    play(make_settings(tmp_path, budget_syncs_per_hour=40.0), ManualClock(), body)
