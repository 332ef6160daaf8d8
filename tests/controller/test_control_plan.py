"""What an order would do, and every way to refuse it: field, message and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from controller.control_plan import describe, plan_steps
from controller.records import Leaving
from controller.registry import LeaseTerms, Registry
from controller.schema import ControlAction, ControlRequest, ControlStep, ControlWhen
from service.errors import ConflictError, InputError, WadilocoError
from tests.controller.helpers import MemoryStore, registration


def fleet(*, num_slots: int = 2) -> Registry:
    """a0 and a1 hold slots 0 and 1, a2 and a3 wait; a1 and a3 are on another node."""
    terms = LeaseTerms(num_slots=num_slots, lease_timeout_s=10, takeover_after_s=3)
    registry = Registry(MemoryStore(), terms, epoch=0, agents=[])
    for index in range(4):
        node = "host-b" if index % 2 else "host-a"
        registry.register(registration(f"a{index}", node=node), now_s=float(index))
    return registry


def plan(action: str, registry: Registry | None = None, **fields: Any) -> tuple[ControlStep, ...]:
    request = ControlRequest.model_validate({"action": action, **fields})
    return plan_steps(request, registry or fleet(), num_slots=2)


def moves(steps: tuple[ControlStep, ...]) -> list[tuple[str, int | None, str | None, str]]:
    return [(step.agent_id, step.slot, step.to_agent, step.when.value) for step in steps]


@pytest.mark.parametrize("target", [{"slot": 0}, {"agent_id": "a0"}])
def test_a_swap_goes_to_the_spare_that_waits_longest(target: dict[str, Any]) -> None:
    assert moves(plan("swap", **target)) == [("a0", 0, "a2", "after_sync")]
    assert moves(plan("swap", when="now", **target)) == [("a0", 0, "a2", "now")]
    assert moves(plan("swap", to_agent="a3", **target)) == [("a0", 0, "a3", "after_sync")]


def test_a_drained_node_gives_up_all_of_its_slots_and_its_spares_get_none() -> None:
    steps = plan("drain", node="host-a")
    assert moves(steps) == [("a0", 0, "a3", "after_sync"), ("a2", None, None, "now")]
    assert describe(steps) == "a0 gives up slot 0 after its next sync, which goes to a3; a2 gets no slot"


def test_a_slot_without_a_spare_stays_empty() -> None:
    registry = fleet()
    for name in ("a2", "a3"):
        registry.release(registry.records[name], drained=True, now_s=9.0)
    assert moves(plan("drain", registry, slot=1)) == [("a1", 1, None, "after_sync")]
    with pytest.raises(ConflictError, match="1 slots are to change hands and 0 spares wait") as caught:
        plan("swap", registry, slot=1)
    assert (caught.value.field, caught.value.remedy) == ("slot", "start another agent, or resume a drained one")


def test_resume_with_a_name_is_about_drained_agents_and_those_that_are_to_leave() -> None:
    registry = fleet()
    registry.release(registry.records["a2"], drained=True, now_s=9.0)
    assert [(step.agent_id, step.change) for step in plan("resume", registry, node="host-a")] == [
        ("a2", ControlAction.RESUME)
    ]
    assert plan("resume", registry) == ()


@pytest.mark.parametrize(
    ("action", "fields", "error", "field"),
    [
        ("drain", {}, InputError, "slot"),
        ("swap", {}, InputError, "slot"),
        ("pause", {"slot": 0}, InputError, "slot"),
        ("sync_now", {"node": "host-a"}, InputError, "node"),
        ("drain", {"slot": 0, "to_agent": "a2"}, InputError, "to_agent"),
        ("drain", {"agent_id": "nobody"}, InputError, "agent_id"),
        ("drain", {"node": "nowhere"}, InputError, "node"),
        ("drain", {"slot": 2}, InputError, "slot"),
        ("swap", {"slot": 0, "to_agent": "nobody"}, InputError, "to_agent"),
        ("swap", {"slot": 0, "to_agent": "a1"}, ConflictError, "to_agent"),
        ("swap", {"slot": 0, "to_agent": "a0"}, ConflictError, "to_agent"),
        ("swap", {"agent_id": "a2"}, ConflictError, "agent_id"),
        ("resume", {"agent_id": "a0"}, ConflictError, "agent_id"),
    ],
)
def test_an_order_that_cannot_be_is_refused(
    action: str, fields: dict[str, Any], error: type[WadilocoError], field: str
) -> None:
    with pytest.raises(error) as caught:
        plan(action, **fields)
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_slot_without_a_living_holder_and_spares_that_cannot_are_refused() -> None:
    registry = fleet()
    registry.leave("a0", "first")
    with pytest.raises(ConflictError, match="nobody alive holds slot 0"):
        plan("drain", registry, slot=0)
    registry.release(registry.records["a2"], drained=True, now_s=9.0)
    with pytest.raises(ConflictError, match="a2 is drained"):
        plan("swap", registry, slot=1, to_agent="a2")
    registry.leave("a3", "first")
    with pytest.raises(ConflictError, match="a3 is not alive"):
        plan("swap", registry, slot=1, to_agent="a3")


def test_draining_twice_is_refused_unless_it_is_to_be_at_once_now() -> None:
    registry = fleet()
    step = plan("drain", registry, slot=0)[0]
    registry.order(registry.records[step.agent_id], Leaving(action=ControlAction.DRAIN))
    with pytest.raises(ConflictError, match="drained already"):
        plan("drain", registry, slot=0)
    assert plan("drain", registry, slot=0, when="now")[0].when is ControlWhen.NOW


def test_a_spare_that_is_promised_a_slot_is_not_promised_another() -> None:
    registry = fleet()
    (first,) = plan("swap", registry, slot=0, to_agent="a2")
    registry.order(registry.records["a0"], Leaving(action=first.change, to_agent=first.to_agent))
    with pytest.raises(ConflictError, match="a2 is to take slot 0 already") as caught:
        plan("swap", registry, slot=1, to_agent="a2")
    assert caught.value.field == "to_agent"
    assert moves(plan("swap", registry, slot=1)) == [("a1", 1, "a3", "after_sync")]
    assert moves(plan("swap", registry, slot=0, to_agent="a2", when="now")) == [("a0", 0, "a2", "now")]
    registry.release(registry.records["a3"], drained=True, now_s=9.0)
    with pytest.raises(ConflictError, match=r"0 spares wait that no other slot was promised to \(1 others do\)"):
        plan("swap", registry, slot=1)
    registry.order(registry.records["a0"], None)
    assert moves(plan("swap", registry, slot=1)) == [("a1", 1, "a2", "after_sync")]


def test_a_swap_does_not_undo_a_drain_that_waits_for_its_sync() -> None:
    registry = fleet()
    registry.order(registry.records["a0"], Leaving(action=ControlAction.DRAIN))
    for when in ControlWhen:
        with pytest.raises(ConflictError, match="a0: to be drained after the next sync") as caught:
            plan("swap", registry, node="host-a", when=when)
        assert (caught.value.field, caught.value.remedy) == ("node", "resume it first, or let it go")
    registry.order(registry.records["a0"], Leaving(action=ControlAction.SWAP, to_agent="a2"))
    assert moves(plan("swap", registry, slot=0, to_agent="a3")) == [("a0", 0, "a3", "after_sync")]


def test_a_request_names_one_target() -> None:
    with pytest.raises(ValidationError, match="give one of them"):
        ControlRequest(action=ControlAction.DRAIN, slot=0, node="host-a")


def test_planning_changes_nothing() -> None:
    registry = fleet()
    before = dict(registry.records)
    plan("drain", registry, node="host-b")
    plan("swap", registry, slot=0)
    assert (dict(registry.records), registry.epoch) == (before, 2)


def test_a_drain_leaves_a_spare_to_the_order_that_it_was_promised_to() -> None:
    registry = fleet()
    registry.order(registry.records["a0"], Leaving(action=ControlAction.SWAP, to_agent="a2"))
    assert moves(plan("drain", registry, slot=1)) == [("a1", 1, "a3", "after_sync")]
    registry.release(registry.records["a3"], drained=True, now_s=9.0)
    assert moves(plan("drain", registry, slot=1)) == [("a1", 1, None, "after_sync")]
    assert moves(plan("drain", registry, slot=0)) == [("a0", 0, "a2", "after_sync")]


def test_a_spare_promised_by_a_drain_is_not_promised_to_a_swap() -> None:
    registry = fleet()
    registry.order(registry.records["a0"], Leaving(action=ControlAction.DRAIN, to_agent="a2"))
    assert moves(plan("swap", registry, slot=1)) == [("a1", 1, "a3", "after_sync")]
    with pytest.raises(ConflictError, match="a2 is to take slot 0 already"):
        plan("swap", registry, slot=1, to_agent="a2")


@pytest.mark.parametrize("how", ["drained", "lost"])
def test_a_promised_spare_takes_the_slot_of_a_lost_island_and_not_that_of_a_drained_one(how: str) -> None:
    registry = fleet()
    registry.release(registry.records["a3"], drained=True, now_s=9.0)
    registry.order(registry.records["a0"], Leaving(action=ControlAction.SWAP, to_agent="a2"))
    if how == "drained":
        registry.release(registry.records["a1"], drained=True, now_s=9.0)
    else:
        registry.leave("a1", "first")
    registry.expire(9.0)
    assert registry.records["a2"].slot == (None if how == "drained" else 1)
    registry.register(registration("a2"), now_s=9.5)
    assert registry.records["a2"].slot == (None if how == "drained" else 1)
    registry.register(registration("a4"), now_s=9.5)
    assert registry.records["a4"].slot == (1 if how == "drained" else None)
