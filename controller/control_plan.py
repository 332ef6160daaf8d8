"""What an operator's order would do to which agents: decided here, carried out elsewhere. Pure.

`drain` takes the slot of each named agent and keeps it from getting another one; the slot goes to the longest-waiting
spare. `swap` hands the slot to a spare and lets the agent wait behind all others. `resume` with a name lets drained
agents have slots again. An agent that has no slot to give up is drained at once. A spare that one order promised a slot
is no other order's to give.
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.promises import promised_slots
from controller.records import AgentRecord
from controller.registry import Registry
from controller.schema import ControlAction, ControlRequest, ControlStep, ControlWhen
from service.errors import ConflictError, InputError

WHOLE_RUN = frozenset({ControlAction.PAUSE, ControlAction.SYNC_NOW})
NEEDS_TARGET = frozenset({ControlAction.DRAIN, ControlAction.SWAP})


def plan_steps(request: ControlRequest, registry: Registry, *, num_slots: int) -> tuple[ControlStep, ...]:
    """The steps of an order, one per agent; none for one that is about the whole run.

    Raises:
        InputError: it names nobody, or somebody who does not exist.
        ConflictError: what it asks for is impossible now, or so already.
    """
    target = _target_of(request)
    if request.to_agent is not None and request.action is not ControlAction.SWAP:
        raise InputError(f"{request.action} hands no slot to a named agent", field="to_agent", remedy="leave it out")
    if request.action in WHOLE_RUN and target is not None:
        raise InputError(f"{request.action} is about the whole run", field=target, remedy="leave it out")
    if target is None:
        if request.action in NEEDS_TARGET:
            raise InputError(f"{request.action} names nobody", field="slot", remedy="give agent_id, slot or node")
        return ()
    named = _named_agents(request, registry, num_slots=num_slots)
    match request.action:
        case ControlAction.DRAIN:
            return _plan_drain(request, named, registry, field=target)
        case ControlAction.SWAP:
            return _plan_swap(request, named, registry, field=target)
        case _:
            return _plan_resume(named, field=target)


def _target_of(request: ControlRequest) -> str | None:
    return next((name for name in ("agent_id", "slot", "node") if getattr(request, name) is not None), None)


def _named_agents(request: ControlRequest, registry: Registry, *, num_slots: int) -> list[AgentRecord]:
    if request.agent_id is not None:
        agent = registry.records.get(request.agent_id)
        if agent is None:
            raise InputError(f"there is no agent {request.agent_id}", field="agent_id", remedy="see GET /v1/islands")
        return [agent]
    if request.slot is not None:
        return [_holder_of(request.slot, registry, num_slots=num_slots)]
    found = [agent for agent in registry.agents if agent.node == request.node]
    if not found:
        raise InputError(f"no agent was seen on node {request.node}", field="node", remedy="see GET /v1/islands")
    return found


def _holder_of(slot: int, registry: Registry, *, num_slots: int) -> AgentRecord:
    if slot >= num_slots:
        raise InputError(f"{slot} is over the last slot {num_slots - 1}", field="slot", remedy="see GET /v1/islands")
    holder = registry.island(slot)
    if holder is None:
        raise ConflictError(f"nobody alive holds slot {slot}", field="slot", remedy="name the agent by its agent_id")
    return holder


def _plan_drain(
    request: ControlRequest, named: list[AgentRecord], registry: Registry, *, field: str
) -> tuple[ControlStep, ...]:
    todo = [agent for agent in named if not _is_drained(agent, when=request.when)]
    if not todo:
        raise ConflictError(f"{_names(named)}: drained already", field=field, remedy="resume it to use it again")
    drained = {agent.agent_id for agent in named}
    taken = drained | promised_slots(registry.islands, but=drained).keys()
    spares = iter([spare for spare in registry.waiting if spare.agent_id not in taken])
    return tuple(
        _step(agent, request, spares if agent.active and agent.slot is not None else iter(())) for agent in todo
    )


def _is_drained(agent: AgentRecord, *, when: ControlWhen) -> bool:
    ordered = agent.leaving is not None and agent.leaving.action is ControlAction.DRAIN
    return agent.drained or (ordered and when is ControlWhen.AFTER_SYNC)


def _plan_swap(
    request: ControlRequest, named: list[AgentRecord], registry: Registry, *, field: str
) -> tuple[ControlStep, ...]:
    holders = [agent for agent in named if agent.active and agent.slot is not None]
    if not holders:
        raise ConflictError(f"{_names(named)}: no slot to hand over", field=field, remedy="name an agent with a slot")
    leaving = [agent for agent in holders if agent.leaving is not None and agent.leaving.action is ControlAction.DRAIN]
    if leaving:
        raise ConflictError(
            f"{_names(leaving)}: to be drained after the next sync", field=field, remedy="resume it first, or let it go"
        )
    promised = promised_slots(registry.islands, but={agent.agent_id for agent in holders})
    spares = [spare for spare in registry.waiting if spare.agent_id not in promised]
    if request.to_agent is not None:
        spares = [_spare(request.to_agent, registry)]
        if request.to_agent in promised:
            raise ConflictError(
                f"{request.to_agent} is to take slot {promised[request.to_agent]} already",
                field="to_agent",
                remedy="name another spare, or resume the holder of that slot first",
            )
    if len(spares) < len(holders):
        others = f" that no other slot was promised to ({len(promised)} others do)" if promised else ""
        raise ConflictError(
            f"{len(holders)} slots are to change hands and {len(spares)} spares wait{others}",
            field="to_agent" if request.to_agent is not None else field,
            remedy="start another agent, or resume a drained one",
        )
    waiting = iter(spares)
    return tuple(_step(agent, request, waiting) for agent in holders)


def _spare(agent_id: str, registry: Registry) -> AgentRecord:
    agent = registry.records.get(agent_id)
    if agent is None:
        raise InputError(f"there is no agent {agent_id}", field="to_agent", remedy="see GET /v1/islands")
    if agent.drained:
        raise ConflictError(f"{agent_id} is drained", field="to_agent", remedy="resume it first")
    if not agent.active:
        raise ConflictError(f"{agent_id} is not alive", field="to_agent", remedy="start it, or leave to_agent out")
    if agent.slot is not None:
        raise ConflictError(f"{agent_id} holds slot {agent.slot}", field="to_agent", remedy="name a waiting agent")
    return agent


def _plan_resume(named: list[AgentRecord], *, field: str) -> tuple[ControlStep, ...]:
    drained = [agent for agent in named if agent.drained or agent.leaving is not None]
    if not drained:
        raise ConflictError(f"{_names(named)}: not drained", field=field, remedy="see GET /v1/islands")
    return tuple(
        ControlStep(agent_id=agent.agent_id, slot=agent.slot, change=ControlAction.RESUME, when=ControlWhen.NOW)
        for agent in drained
    )


def _step(agent: AgentRecord, request: ControlRequest, spares: Iterable[AgentRecord]) -> ControlStep:
    spare = next(iter(spares), None)
    gives_up = agent.active and agent.slot is not None
    return ControlStep(
        agent_id=agent.agent_id,
        slot=agent.slot,
        change=request.action,
        when=request.when if gives_up else ControlWhen.NOW,
        to_agent=None if spare is None else spare.agent_id,
    )


def _names(agents: list[AgentRecord]) -> str:
    return ", ".join(agent.agent_id for agent in agents)


def describe(steps: Iterable[ControlStep]) -> str:
    """The steps in one sentence."""
    return "; ".join(_describe(step) for step in steps)


def _describe(step: ControlStep) -> str:
    if step.change is ControlAction.RESUME:
        return f"{step.agent_id} may hold a slot" if step.slot is None else f"{step.agent_id} keeps slot {step.slot}"
    if step.slot is None:
        return f"{step.agent_id} gets no slot"
    moment = "at once" if step.when is ControlWhen.NOW else "after its next sync"
    heir = f"goes to {step.to_agent}" if step.to_agent is not None else "stays empty until a spare comes"
    return f"{step.agent_id} gives up slot {step.slot} {moment}, which {heir}"
