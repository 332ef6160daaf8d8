"""Who keeps whose replicas: rules that hold for every fleet, and what a change of membership moves."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.buddies import Member, assign_buddies

Buddies = dict[int, tuple[str, ...]]


def member(agent_id: str, slot: int | None = None, *, node: str | None = None, keeps: bool = True) -> Member:
    return Member(agent_id=agent_id, node=node or f"on-{agent_id}", slot=slot, keeps=keeps)


def assign(members: list[Member], before: Buddies | None = None, *, factor: int = 1, same: bool = False) -> Buddies:
    return assign_buddies(members, factor=factor, allow_same_node=same, before=before or {})


def test_a_spare_is_preferred_and_is_not_given_more_than_its_share() -> None:
    pair = [member("a", 0), member("b", 1), member("spare")]
    assert assign(pair) == {0: ("spare",), 1: ("spare",)}
    many = [member(f"h{slot}", slot) for slot in range(8)] + [member("spare")]
    load = Counter(name for buddies in assign(many).values() for name in buddies)
    assert load["spare"] == 2
    assert max(load.values()) == 2


def test_nobody_keeps_what_its_own_host_holds_unless_that_is_allowed() -> None:
    one_host = [member("a", 0, node="host"), member("b", 1, node="host"), member("spare", node="host")]
    assert assign(one_host) == {0: (), 1: ()}
    assert assign(one_host, same=True) == {0: ("spare",), 1: ("spare",)}


def test_two_buddies_are_on_two_hosts() -> None:
    members = [member("a", 0), member("s1", node="x"), member("s2", node="x"), member("s3", node="y")]
    assert assign(members, factor=2) == {0: ("s1", "s3")}
    assert assign(members[:3], factor=2) == {0: ("s1",)}


def test_a_spare_that_takes_over_gets_a_buddy_of_its_own_and_the_rest_stays() -> None:
    members = [member("a", 0), member("b", 1), member("c", 2), member("spare")]
    before = assign(members)
    after = [member("b", 1), member("c", 2), member("spare", 0)]
    now = assign(after, before)
    assert now[0] != before[0]
    assert all(now[slot] == before[slot] for slot in (1, 2) if before[slot] != ("a",))


def test_no_buddies_without_replication_and_none_that_cannot_keep() -> None:
    members = [member("a", 0), member("spare", keeps=False)]
    assert assign(members) == {0: ()}
    assert assign([member("a", 0), member("spare")], factor=0) == {0: ()}


def test_a_fleet_of_four_thousand_slots_is_assigned_in_no_time() -> None:
    members = [member(f"h{slot}", slot) for slot in range(4096)] + [member(f"s{index}") for index in range(400)]
    started_s = time.process_time()
    found = assign(members, factor=2)
    assert all(len(buddies) == 2 for buddies in found.values())
    # A search of all agents for each slot would take minutes.
    assert time.process_time() - started_s < 20


@st.composite
def fleets(draw: st.DrawFn) -> list[Member]:
    num = draw(st.integers(1, 12))
    num_nodes = draw(st.integers(1, num))
    num_slots = draw(st.integers(0, num))
    slots: list[int | None] = [*range(num_slots), *[None] * (num - num_slots)]
    return [
        member(
            f"a{index}", slots[index], node=f"n{draw(st.integers(0, num_nodes - 1))}", keeps=draw(st.integers(0, 4)) > 0
        )
        for index in range(num)
    ]


@given(fleet=fleets(), factor=st.integers(0, 2), same=st.booleans())
@settings(deadline=None)
def test_what_holds_for_every_fleet(fleet: list[Member], factor: int, same: bool) -> None:
    found = assign(fleet, factor=factor, same=same)
    by_id = {each.agent_id: each for each in fleet}
    holders = {each.slot: each for each in fleet if each.slot is not None}
    assert set(found) == set(holders)
    for slot, buddies in found.items():
        holder = holders[slot]
        assert len(buddies) == len(set(buddies)) <= factor
        assert all(by_id[name].keeps and name != holder.agent_id for name in buddies)
        nodes = [by_id[name].node for name in buddies]
        assert same or len({holder.node, *nodes}) == len(nodes) + 1
        could = {each.node for each in fleet if each.keeps and each.node != holder.node}
        could_here = [each for each in fleet if each.keeps and each is not holder]
        assert len(buddies) == min(factor, len(could_here) if same else len(could))
    assert assign(fleet, found, factor=factor, same=same) == found


@given(fleet=fleets(), gone=st.integers(0, 11))
@settings(deadline=None)
def test_who_leaves_moves_only_what_depends_on_it_when_nothing_gets_out_of_balance(
    fleet: list[Member], gone: int
) -> None:
    before = assign(fleet)
    lost = fleet[gone % len(fleet)]
    if lost.slot is not None:
        return
    after = assign([each for each in fleet if each is not lost], before)
    moved = [slot for slot in before if after[slot] != before[slot]]
    kept = sum(lost.agent_id in buddies for buddies in before.values())
    # Each that has to move can push one other away from where it goes.
    assert len(moved) <= 2 * kept
