"""One false report costs nobody a slot: not the process that told it, not the next one, not the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.nonsense import STEPS_AT_ONCE
from diloco.schema import Phase, Progress
from tests.controller.helpers import EPOCH_0, Client, ManualClock, make_settings, play, progress, until

WILD: dict[str, Any] = {
    "step": 10**12,
    "tokens": 10**18,
    "inner_steps_since_sync": 10**12,
    "step_time_s": 1e308,
    "update_norm": 1e308,
    "restarts": 2**61,
}


async def last_reason(client: Client) -> str:
    decisions = (await client.get("/v1/decisions", limit=10_000))["decisions"]
    return str(decisions[-1]["reason"]) if decisions else ""


def test_a_wild_report_is_refused_and_the_island_goes_on(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        refused = await client.try_beat(epoch=1, progress=progress().model_copy(update=WILD))
        assert (refused.status_code, refused.json()["field"]) == (422, "progress.restarts")
        await client.beat(epoch=1, progress=progress(5))
        for name, value in WILD.items():
            refused = await client.try_beat(epoch=1, progress=progress(5).model_copy(update={name: value}))
            assert (refused.status_code, refused.json()["field"]) == (422, f"progress.{name}")
        await client.beat(epoch=1, progress=progress(6, step=1001))
        assert await client.metric('wadiloco_controller_reports_total{outcome="nonsense"}') == 7

        async def waits() -> bool:
            return await last_reason(client) == "below_fixed_h"

        await until(waits, "a decision about the honest report")
        assert (await client.get("/v1/islands"))[0]["progress"]["step"] == 1001

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_false_report_that_was_believed_does_not_lock_out_the_process_for_longer_than_its_lease(
    tmp_path: Path,
) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress())
        await client.beat(epoch=1, progress=progress(step=STEPS_AT_ONCE, restarts=50))
        assert (await client.try_beat(epoch=1, progress=progress(step=1001))).status_code == 422
        clock.advance(11)

        async def lost() -> bool:
            return not (await client.get("/v1/islands"))[0]["alive"]

        await until(lost, "the lease ends")
        lease = await client.register()
        await client.beat(epoch=lease.epoch - EPOCH_0, progress=progress(step=1001))

    play(make_settings(tmp_path), clock, body)


def test_a_new_process_is_believed_whatever_another_claimed(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register(instance="liar")
        await client.beat(instance="liar", epoch=1, progress=progress(step=10**9, restarts=100))
        clock.advance(4)
        lease = await client.register(instance="honest")
        assert lease.resume is not None
        await client.beat(
            instance="honest", epoch=lease.epoch - EPOCH_0, progress=progress(0, step=0, phase=Phase.STARTING)
        )
        await client.beat(instance="honest", epoch=lease.epoch - EPOCH_0, progress=progress(3, step=3))

    play(make_settings(tmp_path), clock, body)


def test_an_island_can_go_on_from_whatever_it_is_handed(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        told = progress(0, step=10**10, tokens=10**16, restarts=10**4)
        for number in range(3):
            lease = await client.register(instance=str(number))
            resume = lease.resume or told
            assert isinstance(resume, Progress)
            later = {"step": resume.step + 10, "tokens": resume.tokens + 10, "inner_steps_since_sync": 10}
            await client.beat(
                instance=str(number), epoch=lease.epoch - EPOCH_0, progress=told if number == 0 else resume
            )
            await client.beat(
                instance=str(number), epoch=lease.epoch - EPOCH_0, progress=resume.model_copy(update=later)
            )
            clock.advance(4)

    play(make_settings(tmp_path), clock, body)


def test_progress_near_a_limit_is_not_handed_on(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await client.register(instance="liar")
        step = 10**10
        await client.beat(instance="liar", epoch=1, progress=progress(step=step))
        for _ in range(10):
            clock.advance(9)
            # Ten times as far as anybody may begin, at the fastest that is believed.
            clock.now_s += 1e5
            lease = await client.register(instance="liar")
            step += 10**10
            await client.beat(instance="liar", epoch=lease.epoch - EPOCH_0, progress=progress(step=step))
        clock.advance(4)
        lease = await client.register(instance="honest")
        assert lease.resume is None or lease.resume.step <= 10**11
        await client.beat(instance="honest", epoch=lease.epoch - EPOCH_0, progress=progress(3, step=3))

    play(make_settings(tmp_path), clock, body)


def test_a_newcomer_raises_the_version_of_the_run_no_further_than_it_can_have_come(tmp_path: Path) -> None:
    clock = ManualClock()

    async def before(client: Client) -> None:
        await client.register("a")
        await client.beat("a", epoch=1, progress=progress(1, round=5))
        await client.register("b")
        refused = await client.try_beat("b", epoch=2, progress=progress(1, round=5000))
        assert (refused.status_code, refused.json()["field"]) == (422, "progress.round")
        await client.beat("b", epoch=2, progress=progress(1, round=6))

    async def after_an_hour(client: Client) -> None:
        # Without a controller islands went on by themselves.
        lease = await client.register("c")
        await client.beat("c", epoch=lease.epoch - EPOCH_0, progress=progress(1, round=5000))
        assert client.controller.state.version == 5000

    settings = make_settings(tmp_path, num_slots=3)
    play(settings, clock, before)
    clock.advance(3600)
    play(settings, clock, after_an_hour)


@pytest.mark.parametrize("first_round", [0, 40])
def test_a_worker_that_starts_says_nothing_about_the_version(tmp_path: Path, first_round: int) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(0, step=0, phase=Phase.STARTING))
        await client.beat(epoch=1, progress=progress(1, step=1, round=first_round))
        assert (await client.get("/v1/budget"))["spent"] == 0
        await client.beat(epoch=1, progress=progress(1, step=2, round=first_round + 1))
        assert (await client.get("/v1/budget"))["spent"] == 1

    play(make_settings(tmp_path, budget_syncs=5), ManualClock(), body)
