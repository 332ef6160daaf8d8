"""The host's clock is set while the controller runs: durations stay, and what other hosts stamp is understood."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from controller.clock import HostClock
from controller.directives import Mailboxes
from controller.schema import DirectiveKind
from diloco.schema import SyncOutcome
from tests.controller.helpers import (
    EPOCH_0,
    START_S,
    Client,
    ManualClock,
    make_settings,
    play,
    progress,
    report,
    sample,
    until,
)


def test_a_clock_that_is_set_changes_no_duration_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    wall, monotonic = ManualClock(START_S), ManualClock(7.0)
    clock = HostClock(wall=wall, monotonic=monotonic)
    with caplog.at_level(logging.WARNING):
        wall.advance(0.9)  # slewed, or jitter
        assert (clock(), clock.correction_s()) == (START_S, 0.0)
        wall.advance(59.1)
        assert (clock(), clock.correction_s(), clock.correction_s()) == (START_S, 60.0, 60.0)
        monotonic.advance(5)
        wall.advance(5.5)
        assert (clock(), clock.correction_s()) == (START_S + 5, 60.0)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == ["the host's clock was set by_s=60.0"]


@pytest.mark.parametrize("by_s", [-3600.0, -30.0, 30.0, 3600.0])
def test_samples_count_again_as_soon_as_the_host_s_clock_was_set(tmp_path: Path, by_s: float) -> None:
    wall, monotonic = ManualClock(), ManualClock(7.0)

    async def post(client: Client) -> object:
        return (await client.http.post("/v1/samples", json={"samples": [sample(t_s=wall())]})).json()

    async def body(client: Client) -> None:
        assert await post(client) == {"accepted": 1, "rejected": []}
        for clock in (wall, monotonic):
            clock.advance(1)
        wall.advance(by_s)
        assert await post(client) == {"accepted": 1, "rejected": []}
        (server,) = (await client.get("/v1/fleet"))["servers"]
        assert (server["known"], server["age_s"]) == (True, 0.0)

    play(make_settings(tmp_path), HostClock(wall=wall, monotonic=monotonic), body)


def test_agents_are_spoken_with_in_the_time_of_their_hosts(tmp_path: Path) -> None:
    wall, monotonic = ManualClock(), ManualClock(7.0)
    by_s = 3600.0

    async def body(client: Client) -> None:
        await client.register()
        wall.advance(by_s)
        await client.beat(epoch=1, progress=progress(20, last_sync_at_s=wall() - 5))
        agent = client.controller.state.registry.records["island-0"]
        assert agent.progress is not None
        assert agent.progress.last_sync_at_s == START_S - 5
        mailboxes: Mailboxes = client.controller.state.mailboxes
        mailboxes.write(
            "island-0", DirectiveKind.SYNC, epoch=EPOCH_0 + 1, t_s=START_S, deadline_s=START_S + 60, round=0
        )
        mailboxes.announce(mailboxes.seq)
        told = (await client.directives())["directives"][-1]
        assert (told["t_s"], told["deadline_s"]) == (wall(), wall() + 60)

        late = report(started_s=wall() - 1, pushed_s=wall(), finished_s=wall())
        await client.beat(epoch=1, progress=progress(0, step=1001, round=1), syncs=[late])
        assert (await client.get("/v1/budget"))["last_sync_s"] <= START_S

    settings = make_settings(tmp_path, policy="no_sync", policy_params={})
    play(settings, HostClock(wall=wall, monotonic=monotonic), body)


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_who_takes_a_slot_over_goes_on_in_the_time_of_its_host(tmp_path: Path, by_s: float) -> None:
    wall, monotonic = ManualClock(), ManualClock(7.0)

    async def body(client: Client) -> None:
        await client.register("a")
        await client.beat("a", epoch=1, progress=progress(20, last_sync_at_s=wall() - 5))
        wall.advance(by_s)
        await client.http.delete("/v1/agents/a", params={"instance": "first"})
        lease = await client.register("b")
        assert lease.resume is not None
        assert lease.resume.last_sync_at_s == wall() - 5
        await client.beat("b", epoch=lease.epoch - EPOCH_0, progress=lease.resume)

    play(make_settings(tmp_path, policy="no_sync"), HostClock(wall=wall, monotonic=monotonic), body)


@pytest.mark.parametrize("left", ["closed", "failed", "open"])
def test_syncs_go_on_after_a_restart_on_a_clock_that_was_set_back(tmp_path: Path, left: str) -> None:
    settings = make_settings(tmp_path, lease_timeout_s=600)
    ahead, clock = ManualClock(START_S + 3600), ManualClock()
    times_s = {"started_s": ahead(), "pushed_s": ahead(), "finished_s": ahead()}

    async def told(client: Client, now: ManualClock, *, after: int) -> None:
        async def is_told() -> bool:
            now.advance(0.5)
            return bool((await client.directives(after=after))["directives"])

        await until(is_told, "a directive to sync")

    async def before(client: Client) -> None:
        lease = await client.register()
        await client.beat(epoch=lease.epoch - EPOCH_0, progress=progress(50))
        await told(client, ahead, after=lease.directive_seq)
        if left == "closed":
            done = report(0, SyncOutcome.APPLIED, **times_s)
            await client.beat(epoch=lease.epoch - EPOCH_0, progress=progress(0, step=1001, round=1), syncs=[done])
        if left == "failed":
            failed = report(0, SyncOutcome.FAILED, **times_s)
            await client.beat(epoch=lease.epoch - EPOCH_0, progress=progress(1, step=1001), syncs=[failed])

    async def after(client: Client) -> None:
        lease = await client.register()
        number = 1 if left == "closed" else 0
        if left == "open":
            awaited = client.controller.state.rounds.open
            assert awaited is not None
            assert awaited.deadline_s <= clock() + settings.sync_timeout_s + settings.report_grace_s
        await client.beat(epoch=lease.epoch - EPOCH_0, progress=progress(50, step=1002, round=number))
        await told(client, clock, after=lease.directive_seq)

    play(settings, ahead, before)
    play(settings, clock, after)
