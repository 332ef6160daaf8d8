"""Buddies, replicas and handovers over HTTP: who keeps what, who takes a slot, and what the journal has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.buddy_book import BuddyBook
from controller.registry import LeaseTerms, Registry
from controller.schema import AgentLease
from diloco.recovery_schema import HandoverReport, ReplicaNotice
from diloco.schema import Restart, Rung
from tests.controller.helpers import (
    EPOCH_0,
    START_S,
    Client,
    ManualClock,
    MemoryStore,
    make_settings,
    play,
    progress,
    registration,
    report,
    until,
)
from tests.controller.test_control import islands, order, stopped
from tests.controller.test_recoveries import kinds, seen


def notice(step: int, *, slot: int = 0, **fields: Any) -> ReplicaNotice:
    base = {"slot": slot, "rank": 0, "generation": step, "step": step, "epoch": EPOCH_0 + 1}
    return ReplicaNotice.model_validate({**base, **fields})


async def join(client: Client, agent_id: str, **fields: Any) -> AgentLease:
    base = {"node": f"on-{agent_id}", "url": f"http://{agent_id}.invalid:9700", "keeps_replicas": True}
    return await client.register(agent_id, **{**base, "hands_over": True, **fields})


async def buddies_known(client: Client, *names: str) -> None:
    async def there() -> bool:
        peers = client.controller.state.buddies.of(0)
        return tuple(peer.agent_id for peer in peers) == names

    await until(there, f"buddies {names}")


def restart(**fields: Any) -> Restart:
    ended = {"detected_s": 1.0, "fetched_s": 1.25, "loaded_s": 1.75, "first_step_s": 2.0}
    times = {name: START_S + after_s for name, after_s in ended.items()}
    told = {"rung": Rung.REPLICA, "generation": 7, "from_step": 99, "steps_repeated": 1}
    return Restart.model_validate({**times, **told, **fields})


def test_holders_hear_of_their_buddies_and_takers_of_replicas(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join(client, "holder")
        await join(client, "spare", keeps_replicas=False)
        await join(client, "far")
        await buddies_known(client, "far")
        reply = await client.beat("holder", epoch=1, progress=progress(5, step=100))
        assert [(peer.agent_id, peer.url, peer.node) for peer in reply.buddies] == [
            ("far", "http://far.invalid:9700", "on-far")
        ]
        lease = await join(client, "far", replicas=(notice(98), notice(99), notice(120, complete=False)))
        assert (lease.buddies, lease.keeps_slots) == ((), (0,))
        await client.http.delete("/v1/agents/holder", params={"instance": "first"})

        async def taken() -> bool:
            return bool((await islands(client))["far"]["slot"] == 0)

        # The spare waits longer, and has nothing of the slot.
        await until(taken, "the one with the replica takes the slot")
        await join(client, "spare", replicas=(notice(99), notice(95, slot=1)))
        of_now = notice(90, epoch=EPOCH_0 + 2)
        lease = await join(client, "far", replicas=(notice(98), of_now))
        # What the present holder sent comes before what one sent that has lost the slot since, however far that went.
        assert [(place.holder.agent_id, place.replica.step) for place in lease.replicas] == [
            ("far", 90),
            ("spare", 99),
            ("far", 98),
        ]

    play(make_settings(tmp_path), clock, body)


def test_no_replica_counts_of_which_a_rank_is_missing(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await join(client, "holder")
        await join(client, "early")
        half = (notice(99, num_ranks=2), notice(98, num_ranks=2, rank=1))
        await join(client, "late", replicas=half)
        await client.http.delete("/v1/agents/holder", params={"instance": "first"})

        async def taken() -> bool:
            return bool((await islands(client))["early"]["slot"] == 0)

        await until(taken, "the longest-waiting takes the slot")

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_restart_keeps_the_buddies_and_what_they_have(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path)

    async def first(client: Client) -> None:
        await join(client, "holder")
        await join(client, "zz", replicas=(notice(99),))
        await buddies_known(client, "zz")
        # It would be chosen, if that were done anew.
        await join(client, "aa")

    async def second(client: Client) -> None:
        await buddies_known(client, "zz")
        lease = await join(client, "holder")
        assert [place.replica.step for place in lease.replicas] == [99]

    play(settings, clock, first)
    play(settings, clock, second)


def test_after_a_restart_a_keeper_is_told_to_keep_what_it_has_before_anything_is_assigned_anew() -> None:
    registry = Registry(
        MemoryStore(), LeaseTerms(num_slots=1, lease_timeout_s=10, takeover_after_s=3), epoch=1, agents=[]
    )
    keeper = registry.register(registration("zz", replicas=(notice(99),)), now_s=0.0)
    book = BuddyBook(MemoryStore(), {"buddies/0": '["zz"]', "buddies/x": "?"}, factor=1, allow_same_node=False)
    assert book.kept_by(keeper, registry.records) == (0,)


def test_a_buddy_on_the_same_node_needs_leave(tmp_path: Path) -> None:
    async def refused(client: Client) -> None:
        await join(client, "holder", node="one")
        await join(client, "spare", node="one")
        await client.loop.tick()
        assert client.controller.state.buddies.of(0) == ()

    async def allowed(client: Client) -> None:
        await join(client, "holder", node="one")
        await join(client, "spare", node="one")
        await buddies_known(client, "spare")

    for name, more, body in (("a", {}, refused), ("b", {"allow_same_node_buddies": True}, allowed)):
        (tmp_path / name).mkdir()
        play(make_settings(tmp_path / name, **more), ManualClock(), body)


def test_an_old_buddy_keeps_its_replica_until_the_new_one_has_it(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await join(client, "holder")
        await join(client, "old", replicas=(notice(99),))
        await buddies_known(client, "old")
        await order(client, "drain", agent_id="old")
        await join(client, "new")
        await buddies_known(client, "new")
        assert (await join(client, "old", replicas=(notice(99),))).keeps_slots == (0,)
        assert (await join(client, "new", replicas=(notice(101),))).keeps_slots == (0,)
        assert (await join(client, "old", replicas=(notice(99),))).keeps_slots == ()

    play(make_settings(tmp_path), ManualClock(), body)


def test_what_the_agent_tells_of_a_recovery_is_in_the_journal_and_the_metrics(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await join(client, "holder")
        await client.beat("holder", epoch=1, progress=progress(5, step=100))
        await join(client, "spare")
        agent = client.controller.state.registry.records["holder"]
        clock.advance(0.5)
        client.controller.give_up(agent)
        lease = await join(client, "spare")
        assert lease.slot == 0
        clock.advance(0.5)
        told = restart(refused=("vault: nothing there",))
        await client.beat("spare", epoch=lease.epoch - EPOCH_0, progress=progress(1, step=100), restarts=[told])
        again = await seen(client, "trains_again")
        assert await kinds(client) == ["agent_gone", "spare_took_slot", "trains_again"]
        assert {name: again[name] for name in ("rung", "generation", "step", "steps_lost", "from_agent")} == {
            "rung": "replica",
            "generation": 7,
            "step": 99,
            "steps_lost": 1,
            "from_agent": "holder",
        }
        times = [again[name] - START_S for name in ("lost_s", "detected_s", "taken_s", "fetched_s", "loaded_s")]
        assert times == [0.0, 0.5, 0.5, 1.25, 1.75]
        assert again["detail"] == "vault: nothing there"
        name = "wadiloco_controller_recovery_phase_seconds_sum"
        spans = [await client.metric(f'{name}{{phase="{phase}"}}') for phase in ("detect", "fence", "fetch", "load")]
        assert spans == [0.5, 0.0, 0.75, 0.5]
        assert await client.metric('wadiloco_controller_recoveries_by_rung_total{rung="replica"}') == 1
        page = (await client.http.get("/v1/export/recoveries.csv")).text.splitlines()
        row = dict(zip(page[0].split(","), page[-1].split(","), strict=True))
        assert (row["rung"], row["load_s"], row["steps_lost"]) == ("replica", "0.5", "1")

    play(make_settings(tmp_path), clock, body)


@pytest.mark.parametrize("field", ["from_step", "steps_lost", "first_step_s"])
def test_impossible_reports_of_recoveries_are_refused(tmp_path: Path, field: str) -> None:
    wrong = {"from_step": 10**15, "steps_lost": 10**15, "first_step_s": START_S + 1e6}[field]

    async def body(client: Client) -> None:
        await join(client, "holder")
        answer = await client.try_beat("holder", epoch=1, restarts=[restart(**{field: wrong})])
        assert (answer.status_code, answer.json()["field"]) == (422, f"restarts.0.{field}")

    play(make_settings(tmp_path), ManualClock(), body)


async def told_to_hand_over(client: Client, agent_id: str) -> dict[str, Any]:
    answer = await client.directives(agent_id, after=0, wait_s=10)
    (found,) = [directive for directive in answer["directives"] if directive["kind"] == "hand_over"]
    return dict(found)


async def pair_that_hands_over(client: Client) -> None:
    await join(client, "holder")
    await client.beat("holder", epoch=1, progress=progress(5, step=100))
    await join(client, "spare")
    await buddies_known(client, "spare")


def handed(step: int = 101) -> HandoverReport:
    return HandoverReport(slot=0, generation=9, step=step, kept_by=("spare",))


@pytest.mark.parametrize("action", ["swap", "drain"])
def test_a_slot_moves_once_its_state_is_handed_over(tmp_path: Path, action: str) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await pair_that_hands_over(client)
        await order(client, action, slot=0, when="now")
        told = await told_to_hand_over(client, "holder")
        assert (told["taker"]["agent_id"], told["deadline_s"]) == ("spare", clock() + 10)
        assert (await islands(client))["holder"]["slot"] == 0
        await client.beat("holder", epoch=1, progress=progress(6, step=101), handed_over=handed())
        await stopped(client, "holder", after=told["seq"])

        async def taken() -> bool:
            return bool((await islands(client))["spare"]["slot"] == 0)

        await until(taken, "the spare has the slot")
        assert (await client.try_beat("holder", epoch=1)).status_code == 409
        renew = (await client.directives("spare", after=0, wait_s=10))["directives"]
        assert [directive["kind"] for directive in renew] == ["renew"]

    play(make_settings(tmp_path), clock, body)


def test_a_swap_after_the_sync_hands_over_too(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await pair_that_hands_over(client)
        await order(client, "swap", slot=0)
        await client.beat("holder", epoch=1, syncs=[report(started_s=1.0)], progress=progress(0, step=102, round=1))
        await told_to_hand_over(client, "holder")
        assert (await islands(client))["holder"]["slot"] == 0
        # Another sync meanwhile changes nothing.
        await client.beat("holder", epoch=1, syncs=[report(1, started_s=1.0)], progress=progress(0, step=103, round=2))
        assert (await islands(client))["holder"]["slot"] == 0
        await client.beat("holder", epoch=1, handed_over=handed(103))
        assert (await islands(client))["spare"]["slot"] == 0

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_holder_that_does_not_hand_over_in_time_loses_its_slot_all_the_same(tmp_path: Path) -> None:
    clock = ManualClock()

    async def body(client: Client) -> None:
        await pair_that_hands_over(client)
        await order(client, "swap", slot=0, when="now")
        for _ in range(4):  # it is not silent
            clock.advance(2.4)
            await client.beat("holder", epoch=1, progress=progress(6, step=101))
            await join(client, "spare")
            await client.loop.tick()
        assert (await islands(client))["holder"]["slot"] == 0
        clock.advance(0.5)

        async def taken() -> bool:
            return bool((await islands(client))["spare"]["slot"] == 0)

        await until(taken, "the spare has the slot")
        assert await kinds(client) == ["swapped", "spare_took_slot"]

    play(make_settings(tmp_path), clock, body)


def test_a_swap_whose_spare_dies_meanwhile_is_called_off_and_the_holder_goes_on(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await pair_that_hands_over(client)
        await order(client, "swap", slot=0, when="now")
        told = await told_to_hand_over(client, "holder")
        client.controller.give_up(client.controller.state.registry.records["spare"])
        await client.beat("holder", epoch=1, handed_over=handed())
        answer = await client.directives("holder", after=told["seq"], wait_s=10)
        assert [directive["kind"] for directive in answer["directives"]] == ["resume"]
        found = await islands(client)
        assert (found["holder"]["slot"], found["holder"]["leaving"]) == (0, None)

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_restart_of_the_controller_in_a_handover_goes_on_with_it(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = make_settings(tmp_path)

    async def first(client: Client) -> None:
        await pair_that_hands_over(client)
        await order(client, "swap", slot=0, when="now")

    async def second(client: Client) -> None:
        await client.beat("holder", epoch=1, progress=progress(6, step=101), handed_over=handed())
        assert (await islands(client))["spare"]["slot"] == 0

    play(settings, clock, first)
    clock.advance(1)
    play(settings, clock, second)
