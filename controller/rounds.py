"""Outer rounds as the controller follows them: opened by a directive or by islands themselves, closed by their reports.

A round closes when every expected slot that still lives has reported, or at its deadline. Reports that come later are
added to it all the same. A round counts as one sync of the budget when it is closed and at least one contribution was
applied. One that failed altogether does not count; it is tried again after `RETRY_AFTER_S` under the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from controller.records import RoundEntry, SlotReport
from controller.registry import StateStore
from diloco.schema import SyncOutcome, SyncReport

AUTONOMOUS = "autonomous"
RETRY_AFTER_S = 5.0
# Enough for every report that may still come, and for the last page of `GET /v1/rounds`.
KEPT_ROUNDS = 1000
# Rounds whose longest is the expected duration of the next: one slow round should not be forgotten at once.
RECENT_ROUNDS = 3
EXPECTED_SYNC_S = 2.0


class RoundOutcome(StrEnum):
    APPLIED = "applied"
    PARTIAL = "partial"
    """Some contributions were applied, others late, failed or missing."""
    FAILED = "failed"


class RoundBook:
    """The last rounds of the run, oldest first."""

    def __init__(
        self, store: StateStore, entries: Iterable[RoundEntry], *, num_applied: int, report_grace_s: float
    ) -> None:
        self._store = store
        self._entries = {entry.id: entry for entry in sorted(entries, key=lambda entry: entry.id)[-KEPT_ROUNDS:]}
        self._report_grace_s = report_grace_s
        self.num_applied = num_applied
        self.version = max((entry.next_version for entry in self._entries.values()), default=0)
        """Version of the global parameters after all rounds known here."""
        self._last_id = max(self._entries, default=0)

    @property
    def entries(self) -> list[RoundEntry]:
        return list(self._entries.values())

    @property
    def open(self) -> RoundEntry | None:
        return next((entry for entry in self._entries.values() if entry.closed_s is None), None)

    def direct(
        self,
        round_: int,
        *,
        decision_id: int,
        policy: str,
        reason: str,
        slots: tuple[int, ...],
        now_s: float,
        deadline_s: float,
    ) -> RoundEntry:
        """Open a round that the controller directs; islands give up at ``deadline_s`` and report soon after."""
        return self._open(
            round_,
            decision_id=decision_id,
            policy=policy,
            reason=reason,
            directed_s=now_s,
            opened_s=now_s,
            deadline_s=deadline_s + self._report_grace_s,
            expected=slots,
        )

    def absorb(
        self, slot: int, report: SyncReport, *, policy: str, live_slots: Collection[int], now_s: float, timeout_s: float
    ) -> RoundEntry | None:
        """Add one report; None when it was known already."""
        known = {(e.slot, e.report.started_s, e.report.round) for entry in self.entries for e in entry.reports}
        if (slot, report.started_s, report.round) in known:
            return None
        entry = self._find(slot, report)
        if entry is None:
            entry = self._open(
                report.round,
                decision_id=None,
                policy=policy,
                reason=AUTONOMOUS,
                directed_s=None,
                opened_s=now_s,
                deadline_s=now_s + timeout_s,
                expected=tuple(sorted({*live_slots, slot})),
            )
        entry = entry.model_copy(update={"reports": (*entry.reports, SlotReport(slot=slot, report=report))})
        self.version = max(self.version, entry.next_version)
        return self._keep(entry)

    def _find(self, slot: int, report: SyncReport) -> RoundEntry | None:
        """The newest round of that number that lacks this slot; else the directed one that it obeyed with a later."""
        newest_first = [entry for entry in reversed(self._entries.values()) if slot not in entry.reported]
        same = next((entry for entry in newest_first if entry.round == report.round), None)
        if same is not None or report.autonomous:
            return same
        # An island that was behind adopts what it missed, and its report names the round that it was really in.
        awaiting = (e for e in newest_first if e.closed_s is None and e.round < report.round and slot in e.expected)
        return next(awaiting, None)

    def settle(self, live_slots: Mapping[int, int | None], now_s: float) -> list[RoundEntry]:
        """Close the rounds that nobody needs to be waited for.

        ``live_slots`` maps the slots of live islands to the version that each trains from. One that is past a round
        and did not report it had nothing to contribute.
        """
        closed = []
        for entry in self.entries:
            awaited = [slot for slot in entry.missing if slot in live_slots and not _is_past(live_slots[slot], entry)]
            if entry.closed_s is None and (not awaited or now_s >= entry.deadline_s):
                closed.append(self._keep(entry.model_copy(update={"closed_s": now_s})))
        return closed

    def collect_spent(self) -> list[RoundEntry]:
        """Closed rounds that were applied somewhere and not counted yet; they are counted now."""
        due = [e for e in self._entries.values() if not e.spent and e.closed_s and e.slots(SyncOutcome.APPLIED)]
        if due:
            self.num_applied += len(due)
            self._store.put("meta", "rounds_applied", str(self.num_applied))
        return [self._keep(entry.model_copy(update={"spent": True})) for entry in due]

    def expected_sync_s(self) -> float:
        """Longest of the last directed rounds that were applied, from directive to close."""
        spans = [e.closed_s - e.directed_s for e in self._entries.values() if e.spent and e.closed_s and e.directed_s]
        return max(spans[-RECENT_ROUNDS:], default=EXPECTED_SYNC_S)

    def last_transfer_s(self) -> float | None:
        """Longest upload of the last applied round. Downloads cannot be told from waiting for other islands."""
        for entry in reversed(self._entries.values()):
            uploads = [r.report.pushed_s - r.report.started_s for r in entry.reports if r.report.pushed_s is not None]
            if entry.spent and uploads:
                return max(0.0, *uploads)
        return None

    def retry_at_s(self) -> float | None:
        """When a round may be tried again after the last one failed."""
        last = next(reversed(self._entries.values()), None)
        failed = last is not None and last.closed_s is not None and not last.spent
        return last.closed_s + RETRY_AFTER_S if failed and last is not None and last.closed_s is not None else None

    def _open(self, round_: int, **fields: object) -> RoundEntry:
        self._last_id += 1
        if len(self._entries) >= KEPT_ROUNDS:
            self._entries.pop(next(iter(self._entries)))
        return self._keep(RoundEntry.model_validate({"id": self._last_id, "round": round_, **fields}))

    def _keep(self, entry: RoundEntry) -> RoundEntry:
        self._store.put("rounds", entry.id, entry)
        self._entries[entry.id] = entry
        return entry


def _is_past(version: int | None, entry: RoundEntry) -> bool:
    return version is not None and version > entry.round


def outcome_of(entry: RoundEntry) -> RoundOutcome:
    applied = entry.slots(SyncOutcome.APPLIED)
    if not applied:
        return RoundOutcome.FAILED
    return RoundOutcome.APPLIED if set(applied) >= set(entry.expected) else RoundOutcome.PARTIAL
