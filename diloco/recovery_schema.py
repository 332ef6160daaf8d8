"""Wire contract of recovery: which replicas of a slot's state are where, and how far a slot is that is handed over.

What a replica consists of, and how it travels between agents, is in `diloco.agent.replica_wire`.
"""

from __future__ import annotations

from pydantic import Field

from diloco.schema import MAX_SLOTS, Count, Slot
from service.wire import Record, Wire

MAX_RANKS = 64
MAX_REPLICAS_TOLD = 4 * MAX_RANKS * 16
"""Of one agent: two generations of all ranks of more slots than a host should be the buddy of."""


class ReplicaNotice(Record):
    """One generation of one rank's state that an agent keeps for another."""

    slot: int = Field(ge=0, lt=MAX_SLOTS)
    rank: int = Field(ge=0, lt=MAX_RANKS)
    num_ranks: int = Field(default=1, ge=1, le=MAX_RANKS)
    generation: int = Field(ge=0, lt=1 << 62)
    step: int = Field(ge=0, lt=1 << 62)
    """Inner steps of the slot when it was taken."""
    epoch: int = Field(ge=0, lt=1 << 62)
    complete: bool = True
    """All of it is there, and its digests were right."""


class Peer(Wire):
    """An agent, and where others reach it."""

    agent_id: str = Field(max_length=128)
    url: str = Field(max_length=512, pattern=r"^https?://")
    node: str = Field(max_length=128)


class ReplicaPlace(Wire):
    """A complete replica, and who has it."""

    holder: Peer
    replica: ReplicaNotice


class SentReplica(Wire):
    """How far a buddy is behind the own vault."""

    buddy: str
    generation: Count | None = None
    """The newest that it has of all ranks; None: none yet."""
    step: Count | None = None
    steps_behind: Count | None = None
    """Inner steps that are in the own vault, and not in that one."""
    generations: Count = 0
    """Sent since the start."""
    sent_bytes: Count = 0
    failure: str = ""
    """Why the last attempt did not succeed; empty: it did."""


class ReplicaList(Wire):
    """``GET /v1/replicas`` of an agent."""

    replicas: tuple[ReplicaNotice, ...]
    """What is kept here of other slots."""
    allocated_bytes: Count
    """What that takes; a slot's rank gets its memory with its first replica, and no more later."""
    limit_bytes: Count
    sent: tuple[SentReplica, ...] = ()
    """Of the own slot, by buddy."""


class HandoverReport(Wire):
    """The holder of a slot that was told to hand it over has stopped, and this is where its state is."""

    slot: Slot
    generation: Count
    step: Count
    kept_by: tuple[str, ...] = Field(default=(), max_length=8)
    """Agents that have all of it; empty: nobody could be reached."""
