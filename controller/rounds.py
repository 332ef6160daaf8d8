"""Outer rounds as the controller follows them: opened by a directive or by islands themselves, closed by their reports.

A round closes when every expected slot that still lives has reported, or at its deadline; one with a quorum below its
slots also `report_grace_s` after that many were applied: an island that hangs holds up nobody. Reports that come later
are added to it all the same. One that failed altogether is tried again after `RETRY_AFTER_S` under the same number.

Every outer step counts once, as one sync of the budget, also where it moves one of several fragments. What proves it is
the version of the global parameters, which islands tell with their progress and their reports, and which counts the
outer steps on all fragments together: when version v appears, rounds up to v - 1 were applied, whether or not anybody
reports them. One that no report told of yet is entered as `UNREPORTED`, and late reports fill it in.

A synchronizer that lost its state counts versions from 0 again. Versions below the highest one prove nothing then: a
round there counts when it closes with a contribution applied, unless it was counted before. A slot contributes once
to an outer step, so its second applied report of a number is another step. Of these steps only those are missed that
no slot reports, until the version is over its old height.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from controller.records import RoundEntry, SlotReport
from controller.registry import StateStore
from controller.round_tally import Tallies
from diloco.schema import SyncOutcome, SyncReport

AUTONOMOUS = "autonomous"
UNREPORTED = "unreported"
RETRY_AFTER_S = 5.0
# Enough for every report that may still come, and for the last page of `GET /v1/rounds`.
KEPT_ROUNDS = 1000
# Rounds whose longest is the expected duration of the next: one slow round should not be forgotten at once.
RECENT_ROUNDS = 3
EXPECTED_SYNC_S = 2.0
# No budget outlasts so many rounds at once; it only bounds the work.
MAX_UNREPORTED = 10_000


class RoundOutcome(StrEnum):
    APPLIED = "applied"
    PARTIAL = "partial"
    """Some contributions were applied, others late, failed or missing."""
    FAILED = "failed"


class RoundBook:
    """The last rounds of the run, oldest first."""

    def __init__(
        self,
        store: StateStore,
        entries: Iterable[RoundEntry],
        *,
        num_applied: int,
        report_grace_s: float,
        counted_to: int | None = None,
    ) -> None:
        self._store = store
        self._entries = {entry.id: entry for entry in sorted(entries, key=lambda entry: entry.id)[-KEPT_ROUNDS:]}
        self._report_grace_s = report_grace_s
        self.num_applied = num_applied
        self.counted_to = counted_to
        """Version up to which outer steps are accounted for; None while no version is known."""
        self.version = max((entry.next_version for entry in self._entries.values()), default=0)
        """Version of the global parameters after all rounds known here."""
        self._last_id = max(self._entries, default=0)
        self._open_ids: set[int] = set()
        self._tallies = Tallies()
        self._claims: set[int] = set()
        """Closed rounds with a contribution applied that are not counted yet."""
        self._known: set[tuple[int, float, int]] = set()
        """Slot, start and round of every report."""
        self._of_number: dict[int, list[int]] = {}
        """Ids by ``round``, oldest first."""
        for entry in self._entries.values():
            self._known |= _reports_of(entry)
            self._index(entry)

    @property
    def entries(self) -> list[RoundEntry]:
        return list(self._entries.values())

    @property
    def open(self) -> RoundEntry | None:
        return self._entries[min(self._open_ids)] if self._open_ids else None

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
        directed: tuple[int, ...] | None = None,
        quorum: int | None = None,
    ) -> RoundEntry:
        """Open a round that the controller directs; islands give up at ``deadline_s`` and report soon after.

        Of its ``slots``, those in ``directed`` come now (None: all), the others join later.
        """
        return self._open(
            round_,
            decision_id=decision_id,
            policy=policy,
            reason=reason,
            directed_s=now_s,
            opened_s=now_s,
            deadline_s=deadline_s + self._report_grace_s,
            expected=slots,
            directed=directed,
            quorum=quorum,
        )

    def join(self, entry: RoundEntry, slots: Iterable[int]) -> RoundEntry:
        """Note that these slots have been told to come to the open round."""
        return self._keep(entry.model_copy(update={"directed": tuple(sorted(entry.told | set(slots)))}))

    def absorb(
        self, slot: int, report: SyncReport, *, policy: str, live_slots: Collection[int], now_s: float, timeout_s: float
    ) -> RoundEntry | None:
        """Add one report; None when it was known already."""
        if (slot, report.started_s, report.round) in self._known:
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
        self._tallies.of(entry).add(slot)
        entry = entry.model_copy(update={"reports": (*entry.reports, SlotReport(slot=slot, report=report))})
        self._known.add((slot, report.started_s, report.round))
        if report.outcome is not SyncOutcome.FAILED:
            self.version = max(self.version, report.round + 1)
        return self._keep(entry)

    def _find(self, slot: int, report: SyncReport) -> RoundEntry | None:
        """The newest round of that number that lacks this slot; else the directed one that it obeyed with a later."""
        of_number = (self._entries[number] for number in reversed(self._of_number.get(report.round, ())))
        same = next((entry for entry in of_number if slot not in self._tallies.of(entry).reported), None)
        if same is not None or report.autonomous:
            return same
        # An island that was behind adopts what it missed, and its report names the round that it was really in.
        awaiting = (self._entries[number] for number in sorted(self._open_ids, reverse=True))
        return next((e for e in awaiting if e.round < report.round and slot in self._tallies.of(e).missing), None)

    def settle(self, live_slots: Mapping[int, int | None], now_s: float) -> list[RoundEntry]:
        """Close the rounds that nobody needs to be waited for.

        ``live_slots`` maps the slots of live islands to the version that each trains from. One that is past a round
        and did not report it had nothing to contribute.
        """
        closed = []
        for entry in [self._entries[number] for number in sorted(self._open_ids)]:
            missing = self._tallies.of(entry).missing
            awaited = any(slot in live_slots and not _is_past(live_slots[slot], entry) for slot in missing)
            if not awaited or now_s >= self._ends_s(entry):
                closed.append(self._keep(entry.model_copy(update={"closed_s": now_s})))
        return closed

    def _ends_s(self, entry: RoundEntry) -> float:
        """When the round closes with those who reported."""
        if entry.quorum is None:
            return entry.deadline_s
        applied = [told.report.finished_s for told in entry.reports if told.report.outcome is SyncOutcome.APPLIED]
        if len(applied) < entry.quorum:
            return entry.deadline_s
        return min(entry.deadline_s, max(entry.opened_s, *applied) + self._report_grace_s)

    def collect_spent(
        self, version: int | None, *, policy: str, now_s: float, applied_s: float | None = None
    ) -> list[RoundEntry]:
        """Rounds that were applied and not counted yet; they are counted now.

        ``version`` is the highest that anybody has told, ``applied_s`` when its outer step was applied, if known.
        """
        began_s = now_s if applied_s is None else min(now_s, applied_s)
        spent = self._account_for(version, policy=policy, began_s=began_s, now_s=now_s)
        for entry in [self._entries[number] for number in sorted(self._claims)]:
            if not self._was_counted(entry):
                spent.append(self._keep(entry.model_copy(update={"spent": True})))
        if spent:
            self.num_applied += len(spent)
            self._store.put("meta", "rounds_applied", str(self.num_applied))
        return spent

    def _account_for(self, version: int | None, *, policy: str, began_s: float, now_s: float) -> list[RoundEntry]:
        """Mark or enter the rounds that lead to ``version``; the first version ever told is where counting begins."""
        if version is None or (self.counted_to is not None and version <= self.counted_to):
            return []
        first = version if self.counted_to is None else max(self.counted_to, version - MAX_UNREPORTED)
        self.counted_to = version
        self._store.put("meta", "rounds_counted_to", str(version))
        return [
            self._keep(
                (
                    self._find_uncounted(number) or self._enter(number, policy=policy, began_s=began_s, now_s=now_s)
                ).model_copy(update={"spent": True})
            )
            for number in range(first, version)
        ]

    def _find_uncounted(self, number: int) -> RoundEntry | None:
        newest_first = reversed(self._entries.values())
        return next((e for e in newest_first if not e.spent and _stands_for(e, number)), None)

    def _enter(self, number: int, *, policy: str, began_s: float, now_s: float) -> RoundEntry:
        entry = self._open(
            number,
            decision_id=None,
            policy=policy,
            reason=UNREPORTED,
            directed_s=None,
            opened_s=began_s,
            deadline_s=now_s,
            expected=(),
        )
        return entry.model_copy(update={"closed_s": now_s})

    def _was_counted(self, entry: RoundEntry) -> bool:
        """Whether the outer step that ``entry`` tells of was counted through another entry."""
        number = max(round_ for _, round_ in entry.applied)
        others = [other for other in self._entries.values() if other.spent and _stands_for(other, number)]
        mine = {(slot, round_) for slot, round_ in entry.applied if round_ == number}
        return bool(others) and not any(mine & other.applied for other in others)

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
            self._forget(next(iter(self._entries)))
        return self._keep(RoundEntry.model_validate({"id": self._last_id, "round": round_, **fields}))

    def _keep(self, entry: RoundEntry) -> RoundEntry:
        self._store.put("rounds", entry.id, entry)
        self._entries[entry.id] = entry
        self._index(entry)
        return entry

    def _index(self, entry: RoundEntry) -> None:
        """Make it known by its newest state."""
        is_open = entry.closed_s is None
        (self._open_ids.add if is_open else self._open_ids.discard)(entry.id)
        if not is_open:
            self._tallies.drop(entry.id)
        is_claim = not entry.spent and not is_open and bool(entry.applied)
        (self._claims.add if is_claim else self._claims.discard)(entry.id)
        same = self._of_number.setdefault(entry.round, [])
        if entry.id not in same:
            same.append(entry.id)

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._open_ids.discard(number)
        self._tallies.drop(number)
        self._claims.discard(number)
        self._known -= _reports_of(entry)
        same = self._of_number[entry.round]
        same.remove(number)
        if not same:
            del self._of_number[entry.round]


def _reports_of(entry: RoundEntry) -> set[tuple[int, float, int]]:
    return {(told.slot, told.report.started_s, told.report.round) for told in entry.reports}


def _stands_for(entry: RoundEntry, number: int) -> bool:
    return entry.round == number or any(round_ == number for _, round_ in entry.applied)


def _is_past(version: int | None, entry: RoundEntry) -> bool:
    return version is not None and version > entry.round


def outcome_of(entry: RoundEntry) -> RoundOutcome:
    applied = entry.slots(SyncOutcome.APPLIED)
    if not applied:
        return RoundOutcome.PARTIAL if entry.spent else RoundOutcome.FAILED
    return RoundOutcome.APPLIED if set(applied) >= set(entry.expected) else RoundOutcome.PARTIAL
