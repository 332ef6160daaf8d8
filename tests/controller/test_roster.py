"""Whatever happens to agents, the indexes say what a look at all of them would say."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controller.records import AgentRecord, Membership
from controller.roster import Roster
from tests.controller.helpers import registration

NUM_SLOTS, LEASE_S = 4, 10.0

STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(Membership),
        st.none() | st.integers(0, NUM_SLOTS - 1),
        st.booleans(),
        st.floats(0, 5),
    ),
    max_size=40,
)


def record(name: str, **fields: Any) -> AgentRecord:
    base = registration(name).model_dump() | {"registered_s": 0.0, "last_beat_s": 0.0, "granted_epoch": 0}
    return AgentRecord.model_validate(base | {"last_slot": fields.get("slot")} | fields)


@given(STEPS)
def test_the_indexes_agree_with_a_look_at_all_agents(
    steps: list[tuple[int, Membership, int | None, bool, float]],
) -> None:
    roster = Roster([], num_slots=NUM_SLOTS, lease_timeout_s=LEASE_S)
    now_s = 0.0
    for number, membership, slot, drained, passed_s in steps:
        now_s += passed_s
        name = f"a{number}"
        holder = None if slot is None else roster.holder_of(slot)
        if membership is Membership.LEFT or (holder is not None and holder.agent_id != name):
            slot = None  # As the registry does: nobody takes what another one holds.
        before = roster.get(name)
        last = slot if slot is not None else (before.last_slot if before else None)
        fields = {"membership": membership, "slot": slot, "last_slot": last, "drained": drained, "last_beat_s": now_s}
        roster.keep(record(name, **fields))
        check(roster)
    silent = {a.agent_id for a in roster.values() if a.active and now_s + 7 - a.last_beat_s > LEASE_S}
    assert {a.agent_id for a in roster.pop_silent(now_s + 7)} == silent
    lost = {a.agent_id for a in roster.values() if not a.active and a.slot is not None}
    forfeit = {name for name in lost if now_s + 14 - roster[name].last_beat_s > 2 * LEASE_S}
    assert {name for name in lost if roster.is_forfeit(roster[name], now_s + 14)} == forfeit
    assert {a.agent_id for a in roster.pop_forfeit(now_s + 14)} == forfeit


def check(roster: Roster) -> None:
    agents = list(roster.values())
    held = {a.slot: a.agent_id for a in agents if a.slot is not None}
    assert {slot: roster.holder_of(slot).agent_id for slot in held} == held  # type: ignore[union-attr]
    assert [a.slot for a in roster.holders] == sorted(held)
    assert roster.lowest_free == min((s for s in range(NUM_SLOTS) if s not in held), default=None)
    waiting = [a.agent_id for a in agents if a.active and a.slot is None and not a.drained]
    assert [a.agent_id for a in roster.waiting] == sorted(waiting)
    assert roster.num_waiting == len(waiting)
    for slot in range(NUM_SLOTS):
        assert {a.agent_id for a in roster.held_last(slot)} == {a.agent_id for a in agents if a.last_slot == slot}
    assert roster.num_never_taken == NUM_SLOTS - len({a.last_slot for a in agents} - {None})


def test_an_agent_that_goes_on_beating_is_looked_at_once_per_lease() -> None:
    roster = Roster([record("a", membership="active", slot=0)], num_slots=1, lease_timeout_s=LEASE_S)
    for now_s in range(1, 100):
        roster.keep(roster["a"].model_copy(update={"last_beat_s": float(now_s)}))
        assert roster.pop_silent(now_s + 0.5) == []
    assert len(roster._leases._heap) == 1
    assert [a.agent_id for a in roster.pop_silent(109.5)] == ["a"]
    assert roster.pop_silent(109.6) == []
