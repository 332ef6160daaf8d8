"""Slots, leases and epochs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.records import AgentRecord, Membership
from controller.registry import FORGET_AFTER_S, LeaseTerms, Registry
from controller.schema import Heartbeat
from service.errors import ConflictError, InputError, WadilocoError
from tests.controller.helpers import MemoryStore, progress, registration, report

LEASE_S = 10.0
TAKEOVER_S = 3.0


def make(num_slots: int = 2, store: MemoryStore | None = None) -> Registry:
    terms = LeaseTerms(num_slots=num_slots, lease_timeout_s=LEASE_S, takeover_after_s=TAKEOVER_S)
    return Registry(store or MemoryStore(), terms, epoch=0, agents=[])


def beat(registry: Registry, agent: AgentRecord, now_s: float, **fields: object) -> AgentRecord:
    return registry.beat(agent, Heartbeat(instance=agent.instance, epoch=0, t_s=0, **fields), now_s=now_s)


def test_agents_get_the_lowest_free_slots_and_then_wait() -> None:
    registry = make()
    agents = [registry.register(registration(f"a{index}"), now_s=0.0) for index in range(3)]
    assert [agent.slot for agent in agents] == [0, 1, None]
    assert registry.epoch == 2
    assert registry.slots_missing == 0


def test_registering_again_is_harmless() -> None:
    registry = make()
    first = registry.register(registration(), now_s=0.0)
    again = registry.register(registration(), now_s=1.0)
    assert (again.slot, again.granted_epoch, registry.epoch) == (first.slot, first.granted_epoch, 1)


def test_a_second_process_is_refused_while_the_first_lives() -> None:
    registry = make()
    registry.register(registration(), now_s=0.0)
    with pytest.raises(ConflictError, match="alive as another process") as caught:
        registry.register(registration(instance="second"), now_s=TAKEOVER_S - 0.1)
    assert caught.value.field == "instance"


def test_a_new_process_takes_over_after_three_missed_heartbeats() -> None:
    registry = make()
    first = registry.register(registration(), now_s=0.0)
    beat(registry, first, 0.0, progress=progress(5))
    second = registry.register(registration(instance="second"), now_s=TAKEOVER_S)
    assert (second.slot, registry.epoch) == (0, 2)
    assert second.progress is None
    with pytest.raises(ConflictError):
        registry.check("island-0", "first")


def test_a_process_that_left_makes_room_at_once() -> None:
    registry = make()
    registry.register(registration(), now_s=0.0)
    registry.leave("island-0", "first")
    assert registry.register(registration(instance="second"), now_s=0.1).slot == 0
    assert registry.epoch == 3


def test_a_missed_lease_raises_the_epoch_and_the_agent_gets_its_slot_back() -> None:
    registry = make()
    registry.register(registration("a0"), now_s=0.0)
    agent = registry.register(registration("a1"), now_s=0.0)
    beat(registry, registry.check("a0", "first"), 10.0)
    assert [lost.agent_id for lost in registry.expire(10.1)] == ["a1"]
    assert registry.epoch == 3
    assert [island.agent_id for island in registry.islands] == ["a0"]
    with pytest.raises(ConflictError, match="no lease"):
        registry.check("a1", "first")
    back = registry.register(registration("a1"), now_s=11.0)
    assert (back.slot, back.granted_epoch) == (1, 4)
    with pytest.raises(ConflictError, match="epoch"):
        registry.check_epoch(back, agent.granted_epoch)


def test_an_old_epoch_is_refused_but_others_joining_makes_nobodys_epoch_old() -> None:
    registry = make()
    agent = registry.register(registration("a0"), now_s=0.0)
    registry.register(registration("a1"), now_s=0.0)
    registry.check_epoch(agent, 1)
    registry.check_epoch(agent, 2)
    for epoch in (0, 3):
        with pytest.raises(ConflictError, match="epoch"):
            registry.check_epoch(agent, epoch)


def test_who_holds_a_slot_that_is_no_more_is_fenced_and_comes_back_as_a_spare() -> None:
    store = MemoryStore()
    before = make(num_slots=2, store=store)
    holders = [before.register(registration(name), now_s=0.0) for name in ("a0", "a1")]
    terms = LeaseTerms(num_slots=1, lease_timeout_s=LEASE_S, takeover_after_s=TAKEOVER_S)
    registry = Registry(store, terms, epoch=before.epoch, agents=before.agents)
    registry.grace(1.0)
    registry.check_epoch(registry.check("a0", "first"), holders[0].granted_epoch)
    with pytest.raises(ConflictError):
        registry.check_epoch(registry.check("a1", "first"), holders[1].granted_epoch)
    with pytest.raises(InputError) as refused:
        registry.register(registration("a1", slot=1), now_s=2.0)
    assert refused.value.field == "slot"
    assert registry.register(registration("a1"), now_s=2.0).slot is None


def test_the_slot_of_a_lost_agent_is_kept_for_one_more_lease_and_then_given_to_a_spare() -> None:
    registry = make(num_slots=1)
    registry.register(registration("a0"), now_s=0.0)
    spare = registry.register(registration("a1"), now_s=0.0)
    assert spare.slot is None
    spare = beat(registry, spare, 11.0)
    registry.expire(11.0)
    assert registry.islands == []
    spare = beat(registry, spare, 20.1)
    registry.expire(20.1)
    assert [island.agent_id for island in registry.islands] == ["a1"]
    with pytest.raises(ConflictError):
        registry.check_epoch(registry.check("a1", "first"), spare.granted_epoch)
    assert registry.register(registration("a1"), now_s=20.2).slot == 0
    assert registry.register(registration("a0"), now_s=20.3).slot is None


def test_a_slot_can_be_asked_for() -> None:
    registry = make()
    assert registry.register(registration("a0", slot=1), now_s=0.0).slot == 1
    assert registry.register(registration("a1"), now_s=0.0).slot == 0
    with pytest.raises(ConflictError, match="held by a0"):
        registry.register(registration("a2", slot=1), now_s=0.0)
    with pytest.raises(InputError) as caught:
        registry.register(registration("a3", slot=2), now_s=0.0)
    assert caught.value.field == "slot"


def test_a_sync_makes_progress_unknown_until_the_next_report() -> None:
    registry = make()
    agent = registry.register(registration(), now_s=0.0)
    agent = beat(registry, agent, 1.0, progress=progress(5))
    assert agent.progress_current
    agent = beat(registry, agent, 2.0, syncs=[report()])
    assert not agent.progress_current
    assert agent.progress == progress(5)
    stale = beat(registry, agent, 3.0, progress=progress(5, round=1), syncs=[report(1)])
    assert not stale.progress_current
    assert beat(registry, agent, 4.0, progress=progress(0, round=2), syncs=[report(1)]).progress_current


def test_every_change_is_handed_to_the_journal() -> None:
    store = MemoryStore()
    registry = make(store=store)
    registry.register(registration(), now_s=0.0)
    registry.expire(100.0)
    restored = Registry(
        MemoryStore(),
        LeaseTerms(num_slots=2, lease_timeout_s=LEASE_S, takeover_after_s=TAKEOVER_S),
        epoch=int(str(store.rows["meta", "epoch"])),
        agents=[row for (table, _), row in store.rows.items() if table == "agents" and isinstance(row, AgentRecord)],
    )
    assert (restored.epoch, restored.agents) == (registry.epoch, registry.agents)


def test_agents_that_are_gone_for_a_day_are_forgotten_unless_something_depends_on_them() -> None:
    store = MemoryStore()
    registry = make(num_slots=2, store=store)
    far = registry.register(registration("far"), now_s=0.0)
    beat(registry, far, 1.0, progress=progress(step=500))
    registry.leave("far", "first")
    for name in ("spare-a", "spare-b", "drained"):
        registry.register(registration(name), now_s=2.0)
    registry.release(registry.check("drained", "first"), drained=True, now_s=2.0)
    for name in ("spare-a", "drained"):
        registry.leave(name, "first")
    assert registry.forget(FORGET_AFTER_S) == 0
    registry.expire(FORGET_AFTER_S + 3)
    # spare-a knows what far told of slot 0. spare-b had slot 1 when it was lost, drained must not train again.
    assert registry.forget(FORGET_AFTER_S + 3) == 1
    assert registry.take_forgotten() == ["far"]
    newest = registry.register(registration("new"), now_s=FORGET_AFTER_S + 3)
    assert (newest.slot, newest.resume and newest.resume.step) == (0, 500)
    assert registry.forget(FORGET_AFTER_S + 4) == 1
    assert sorted(registry.records) == ["drained", "new", "spare-b"]
    assert sorted(key for table, key in store.rows if table == "agents") == ["drained", "new", "spare-b"]
    assert registry.register(registration("drained"), now_s=FORGET_AFTER_S + 5).slot is None


def test_names_that_were_used_once_do_not_lock_new_ones_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.registry.MAX_AGENTS", 4)
    monkeypatch.setattr("controller.registry.FORGET_AT_ONCE", 2)
    registry = make(num_slots=1)
    registry.register(registration("holder"), now_s=0.0)
    for index in range(10):
        registry.register(registration(f"once-{index}"), now_s=float(index))
        registry.leave(f"once-{index}", "first")
        assert len(registry.records) <= 4
    assert {"holder", "once-9"} <= registry.records.keys()
    for name in ("b", "c", "d"):
        registry.register(registration(name), now_s=20.0)
    with pytest.raises(ConflictError) as refused:
        registry.register(registration("e"), now_s=20.0)
    assert (refused.value.field, len(registry.records)) == ("agent_id", 4)


def test_agents_that_never_trained_lock_nobody_out_of_a_slot_without_a_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.registry.MAX_AGENTS", 2000)
    registry = make(num_slots=1)
    for index in range(2000):
        registry.register(registration(f"once-{index}"), now_s=float(index))
        registry.leave(f"once-{index}", "first")
    began_s = time.process_time()
    assert registry.register(registration("new"), now_s=3000.0).slot == 0
    assert registry.forget(2 * FORGET_AFTER_S) > 1500
    assert time.process_time() - began_s < 2.0  # by the square of their number it were tens of seconds


events = st.lists(
    st.tuples(
        st.sampled_from(["register", "leave", "beat", "wait", "expire", "forget"]),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["x", "y"]),
        st.floats(0, 15),
    ),
    max_size=40,
)


@given(events=events)
def test_a_slot_never_has_two_holders_and_the_epoch_never_falls(
    events: list[tuple[str, str, str, float]],
) -> None:
    registry = make()
    now_s = 0.0
    for event, agent_id, instance, seconds in events:
        epoch, before = registry.epoch, {(a.agent_id, a.instance, a.slot) for a in registry.islands}
        try:
            if event == "register":
                registry.register(registration(agent_id, instance), now_s=now_s)
            elif event == "leave":
                registry.leave(agent_id, instance)
            elif event == "beat":
                beat(registry, registry.check(agent_id, instance), now_s)
            elif event == "wait":
                now_s += seconds * FORGET_AFTER_S if seconds > 14 else seconds
            elif event == "forget":
                registry.forget(now_s)
            else:
                registry.expire(now_s)
        except WadilocoError:
            pass
        slots = [island.slot for island in registry.islands]
        assert len(slots) == len(set(slots))
        after = {(a.agent_id, a.instance, a.slot) for a in registry.islands}
        assert registry.epoch >= epoch + (after != before)
        assert all(a.granted_epoch <= registry.epoch for a in registry.agents)
        assert all(a.membership is Membership.ACTIVE for a in registry.islands)
