"""Which spare may have which free slot, where orders that wait for a sync have promised some of them. Pure.

A promise is kept: its spare gets no slot that an operator emptied, nor one that another order empties. Only a slot
whose holder was lost comes before it: that the run trains is worth more than who trains in a slot that is held anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from controller.records import AgentRecord
from controller.roster import Roster
from controller.takers import best_taker


def promised_slots(islands: Iterable[AgentRecord], *, but: Collection[str] = ()) -> dict[str, int]:
    """Spares that are to take a slot after the next sync of its holder, and which; ``but`` leaves out these holders."""
    return {
        agent.leaving.to_agent: agent.slot
        for agent in islands
        if agent.agent_id not in but and agent.leaving is not None
        if agent.leaving.to_agent is not None and agent.slot is not None
    }


def next_promotion(roster: Roster) -> tuple[AgentRecord, int] | None:
    """The next spare that gets a free slot; None when there is none of either, or none that may."""
    waiting, free = roster.waiting, roster.free
    if not waiting or not free:
        return None
    promised = promised_slots(agent for agent in roster.holders if agent.active)
    if heirs := [agent for agent in waiting if agent.agent_id not in promised]:
        return best_taker(heirs, free[0]), free[0]
    slot = next((slot for slot in free if not was_emptied(roster, slot)), None)
    return None if slot is None else (best_taker(waiting, slot), slot)


def free_slot_for(roster: Roster, agent_id: str) -> int | None:
    """The slot that an agent gets which asks for none in particular."""
    promised = promised_slots(agent for agent in roster.holders if agent.active)
    if agent_id not in promised:
        return roster.lowest_free
    return next((slot for slot in roster.free if not was_emptied(roster, slot)), None)


def was_emptied(roster: Roster, slot: int) -> bool:
    """Whether an operator drained the last holder of a free slot."""
    last = max(roster.held_last(slot), key=lambda agent: agent.granted_epoch, default=None)
    return last is not None and last.drained
