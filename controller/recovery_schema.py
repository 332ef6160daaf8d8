"""Wire contract of recoveries: what was lost, and how it came back. Part of `controller.schema`."""

from __future__ import annotations

from enum import StrEnum

from diloco.schema import Rung
from service.wire import Wire


class RecoveryKind(StrEnum):
    """What became known about a slot, an agent or the controller. Exported as a metric label."""

    LEASE_LOST = "lease_lost"
    """The holder of a slot was silent for longer than its lease."""
    LEFT = "left"
    """The holder of a slot ended in order."""
    DRAINED = "drained"
    """The holder of a slot gave it up because an operator drained it."""
    SWAPPED = "swapped"
    """The holder of a slot gave it up because an operator swapped it."""
    PROCESS_REPLACED = "process_replaced"
    """Another process took over the agent, and its slot with it, before its lease ended."""
    AGENT_GONE = "agent_gone"
    """The holder's connection broke, and nothing listens at its address any more: it is not waited for."""
    SPARE_TOOK_SLOT = "spare_took_slot"
    AGENT_RETURNED = "agent_returned"
    """The agent that had lost the slot, or had left it, came back to it."""
    WORKER_RESTARTED = "worker_restarted"
    """The agent started its rank worker anew."""
    TRAINS_AGAIN = "trains_again"
    """The slot took its first inner step since it was lost: the end of a recovery, with all of its times."""
    CONTROLLER_RESTARTED = "controller_restarted"


class Recovery(Wire):
    """One thing that became known in a recovery. A recovery has several, which share its number."""

    t_s: float
    kind: RecoveryKind
    slot: int | None = None
    """None when it is about the whole run."""
    agent_id: str | None = None
    from_agent: str | None = None
    """Who held the slot before."""
    epoch: int
    recovery: int
    """Number of the recovery."""
    lost_s: float | None = None
    """Last sign of life of the holder before; for an order, when the slot was given up."""
    taken_s: float | None = None
    """When the slot had a living holder again."""
    first_step_s: float | None = None
    """When that holder took its first inner step, as its agent says; where it does not, when it was reported."""
    detected_s: float | None = None
    """When the loss was seen: by the controller, or of a worker by its agent."""
    fetched_s: float | None = None
    """When the state was on the host of the new holder."""
    loaded_s: float | None = None
    """When the worker had it."""
    rung: Rung | None = None
    """Where the state came from; None where the agent does not say, and for global parameters before agents did."""
    generation: int | None = None
    """Number of the snapshot."""
    step: int | None = None
    """At which training went on."""
    steps_lost: int | None = None
    """Inner steps that were taken again; None: unknown."""
    detail: str = ""
    """What could not be used, and why."""


class RecoveryRecord(Recovery):
    """One journalled `Recovery`."""

    id: int


class RecoveryPage(Wire):
    """``GET /v1/recoveries?since=&limit=``."""

    recoveries: list[RecoveryRecord]
    next_since: int
    """Pass as ``since`` to get what came later."""
