"""Which spare takes a slot, and where its state is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.records import AgentRecord
from diloco.recovery_schema import Peer, ReplicaNotice, ReplicaPlace

NONE = (-1, -1)
"""Before any replica."""


def best_taker(waiting: Sequence[AgentRecord], slot: int) -> AgentRecord:
    """Of the waiting agents (at least one, the longest-waiting first) the one with the newest replica of the slot.

    Without any replica that is the longest-waiting.
    """
    return max(waiting, key=lambda agent: newest(agent.replicas, slot))


def newest(replicas: Iterable[ReplicaNotice], slot: int) -> tuple[int, int]:
    """Epoch and step of the newest complete replica of all the slot's ranks; `NONE` where there is none.

    By the epoch first: what a holder sent that had lost the slot already, and did not know, is older than what the
    holder after it sent, however many steps it has taken alone.
    """
    ranks: dict[tuple[int, int, int], set[int]] = {}
    for replica in replicas:
        if replica.slot == slot and replica.complete:
            ranks.setdefault((replica.epoch, replica.step, replica.num_ranks), set()).add(replica.rank)
    whole = [(epoch, step) for (epoch, step, num_ranks), found in ranks.items() if len(found) == num_ranks]
    return max(whole, default=NONE)


def peer_of(agent: AgentRecord) -> Peer | None:
    """Where others reach it; None where it did not say."""
    return None if agent.url is None else Peer(agent_id=agent.agent_id, url=agent.url, node=agent.node)


def replica_places(agents: Iterable[AgentRecord], slot: int) -> tuple[ReplicaPlace, ...]:
    """Complete replicas of a slot that active agents keep, the newest first; of equal ones in the agents' order."""
    found = [
        ReplicaPlace(holder=holder, replica=replica)
        for agent in agents
        if agent.active and agent.replicas and (holder := peer_of(agent)) is not None
        for replica in agent.replicas
        if replica.slot == slot and replica.complete
    ]
    return tuple(sorted(found, key=lambda place: (-place.replica.epoch, -place.replica.step)))
