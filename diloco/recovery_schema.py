"""Wire contract of recovery: which replicas of a slot's state are where, what an agent restored from, and how long it
took. An island's state is described in `diloco.vault`.

Between agents, chunks of a replica travel as raw bytes:

| ``PUT /v1/replicas/{slot}/{rank}/{generation}`` | `ReplicaOffer`; the answer says what is there already |
| ``PUT /v1/replicas/{slot}/{rank}/{generation}/{part}`` with ``Content-Range`` and ``Content-Digest`` | one chunk |
| ``GET /v1/replicas/{slot}/{rank}/{generation}`` | the `ReplicaOffer` of a complete replica |
| ``GET /v1/replicas/{slot}/{rank}/{generation}/{part}`` with ``Range`` | bytes of it |
| ``GET /v1/replicas`` | `ReplicaList`: what is kept here |

Digests are sha-256. An epoch below the newest one that the keeper has seen of the slot is refused (409): whoever sends
it has lost the slot.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from diloco.schema import MAX_SLOTS, Count, Slot
from service.wire import Record, Wire

MAX_RANKS = 64
MAX_PARTS = 8
MAX_REPLICAS_TOLD = 4 * MAX_RANKS * 16
"""Of one agent: two generations of all ranks of more slots than a host should be the buddy of."""
MAX_REPORTS = 100
MAX_WHY = 500

Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
PartName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Rung(StrEnum):
    """Where the state of a slot that goes on came from. Exported as a metric label."""

    OWN_VAULT = "own_vault"
    """The vault of the host that had the slot before, too."""
    REPLICA = "replica"
    """The vault of a buddy: on this host, or fetched from another one."""
    GLOBAL = "global"
    """Global parameters, with a fresh inner optimizer: steps since the last sync are lost."""
    DISK = "disk"


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


class ReplicaPart(Wire):
    """A part of a generation that changes, or does not, as a whole."""

    name: PartName
    num_bytes: Count
    digest: Digest


class ReplicaOffer(Wire):
    """What a generation is made of: said before its bytes are sent."""

    run_id: str = Field(min_length=1, max_length=64)
    num_ranks: int = Field(default=1, ge=1, le=MAX_RANKS)
    epoch: Count
    step: Count
    header: str = Field(max_length=16384)
    """The generation's own header, base64: kept and given back as it is."""
    parts: tuple[ReplicaPart, ...] = Field(min_length=1, max_length=MAX_PARTS)


class ReplicaReply(Wire):
    """Answer to an offer or a chunk."""

    received_bytes: dict[str, Count]
    """By part: go on from here. A part that the keeper has from an earlier generation is there as a whole."""
    complete: bool
    """Verified as a whole, and what a restore would take from now on."""


class ReplicaList(Wire):
    """``GET /v1/replicas``."""

    replicas: tuple[ReplicaNotice, ...]
    allocated_bytes: Count
    """What all replicas may come to take; allocated when the first chunk of a slot's rank comes."""


class RestoreReport(Wire):
    """One recovery of a slot as its agent saw it; Unix times. What did not happen is None."""

    slot: Slot
    epoch: Count
    rung: Rung
    generation: Count | None = None
    step: Count
    """At which training went on."""
    steps_lost: Count | None = None
    """Steps that are known to have been taken beyond that one; None where nobody knows."""
    began_s: float = Field(ge=0)
    """When the agent saw that its worker was gone, or got the slot."""
    fetched_s: float | None = Field(default=None, ge=0)
    """When the whole state was on this host."""
    loaded_s: float | None = Field(default=None, ge=0)
    """When the worker had it, and was ready to train."""
    first_step_s: float = Field(ge=0)
    """When the first inner step after it had been taken."""
    refused: tuple[str, ...] = Field(default=(), max_length=20)
    """Why better rungs were not taken, one sentence each."""


class HandoverReport(Wire):
    """The holder of a slot that was told to hand it over has stopped, and this is where its state is."""

    slot: Slot
    generation: Count
    step: Count
    kept_by: tuple[str, ...] = Field(default=(), max_length=8)
    """Agents that have all of it; empty: nobody could be reached."""
