"""What follows from a decision: its record in the journal, the round that it opens, the directives to its islands."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from controller.fragments import fragments_due
from controller.journal_tables import decision_row
from controller.policy.base import Decision
from controller.records import AgentRecord, RoundEntry
from controller.schema import DecisionRecord, DirectiveKind, Mode
from controller.state import FleetState

logger = logging.getLogger(__name__)


def journal_decision(
    state: FleetState,
    decision: Decision,
    *,
    round_number: int,
    slots: tuple[int, ...],
    now_s: float,
    slot: int | None = None,
    shadow: str | None = None,
) -> DecisionRecord:
    """Number a decision and put it into the journal's queue.

    ``slot`` is the island that it is about, None: all. ``shadow`` is the policy in shadow that took it, None: the one
    in force.
    """
    state.last_decision_id += 1
    record = DecisionRecord(
        id=state.last_decision_id,
        t_s=now_s,
        policy=shadow or state.policy.name,
        action=decision.action,
        reason=decision.reason,
        round=round_number,
        slots=slots,
        terms=dict(decision.terms),
        slot=slot,
        shadow=shadow is not None,
    )
    state.journal.append("decisions", decision_row(record))
    return record


def open_round(
    state: FleetState,
    record: DecisionRecord,
    *,
    slots: tuple[int, ...],
    directed: tuple[int, ...] | None = None,
) -> RoundEntry:
    """Open the round that a decision begins, for ``slots``; those in ``directed`` come now (None: all)."""
    quorum = state.settings.quorum
    entry = state.rounds.direct(
        record.round,
        decision_id=record.id,
        policy=record.policy,
        reason=record.reason,
        slots=slots,
        now_s=record.t_s,
        deadline_s=record.t_s + state.settings.sync_timeout_s,
        directed=directed,
        quorum=None if quorum is None else min(quorum, len(slots)),
    )
    logger.info("sync directed round=%d reason=%s slots=%s", record.round, record.reason, slots)
    return entry


def write_sync(
    state: FleetState, islands: Iterable[AgentRecord], entry: RoundEntry, *, reason: str, now_s: float
) -> None:
    """Tell these islands to come to the round. Its deadlines count from its beginning, whenever they are told."""
    times = state.settings.sync_times
    began_s = entry.directed_s if entry.directed_s is not None else now_s
    num_expected = len(entry.expected)
    fragments = fragments_due(entry.round, state.settings.num_fragments)
    state.mailboxes.write_all(
        [island.agent_id for island in islands],
        DirectiveKind.SYNC,
        epoch=state.registry.epoch,
        t_s=now_s,
        round=entry.round,
        quorum=num_expected if entry.quorum is None else entry.quorum,
        expected=num_expected,
        fragments=fragments,
        deadline_s=began_s + times.sync_timeout_s,
        close_by_s=began_s + times.close_s,
        overlap=state.settings.mode is Mode.PER_ISLAND,
        reason=reason,
    )


def islands_of(state: FleetState, slots: Collection[int]) -> list[AgentRecord]:
    wanted = frozenset(slots)
    return [island for island in state.registry.islands if island.slot in wanted]
