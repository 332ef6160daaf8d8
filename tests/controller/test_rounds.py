"""When a round closes, what it costs, and what is remembered of it."""

from __future__ import annotations

import pytest

from controller.records import RoundEntry
from controller.rounds import (
    AUTONOMOUS,
    EXPECTED_SYNC_S,
    RETRY_AFTER_S,
    UNREPORTED,
    RoundBook,
    RoundOutcome,
    outcome_of,
)
from diloco.schema import SyncOutcome, SyncReport
from tests.controller.helpers import START_S, MemoryStore, report

BOTH: dict[int, int | None] = {0: 0, 1: None}
"""Two live islands, and the version that each trains from."""


def make(counted_to: int | None = 0) -> RoundBook:
    return RoundBook(MemoryStore(), [], num_applied=0, report_grace_s=3.0, counted_to=counted_to)


def direct(book: RoundBook, round_: int = 0, *, now_s: float = START_S, slots: tuple[int, ...] = (0, 1)) -> RoundEntry:
    return book.direct(
        round_,
        decision_id=7,
        policy="fixed_h",
        reason="fixed_h_reached",
        slots=slots,
        now_s=now_s,
        deadline_s=now_s + 60,
    )


def absorb(book: RoundBook, slot: int, sync: SyncReport, *, now_s: float = START_S + 3) -> RoundEntry | None:
    return book.absorb(slot, sync, policy="fixed_h", live_slots=BOTH, now_s=now_s, timeout_s=60.0)


def spend(book: RoundBook, version: int | None = None) -> list[RoundEntry]:
    told = book.version if version is None else version
    return book.collect_spent(told, policy="fixed_h", now_s=START_S + 5)


def test_a_round_closes_when_every_directed_slot_has_reported() -> None:
    book = make()
    direct(book)
    absorb(book, 0, report())
    assert book.settle(BOTH, START_S + 3) == []
    absorb(book, 1, report())
    (entry,) = book.settle(BOTH, START_S + 4)
    assert outcome_of(entry) is RoundOutcome.APPLIED
    assert len(spend(book)) == 1
    assert spend(book) == []
    assert (book.version, book.num_applied) == (1, 1)
    assert book.expected_sync_s() == pytest.approx(4.0)
    assert book.last_transfer_s() == pytest.approx(1.0)
    record = entry.to_record()
    assert (record.slots_applied, record.bytes_total, record.decision_id) == ((0, 1), 400, 7)


def test_a_dead_island_is_not_waited_for() -> None:
    book = make()
    direct(book)
    absorb(book, 0, report())
    (entry,) = book.settle({0: 0}, START_S + 3)
    assert outcome_of(entry) is RoundOutcome.PARTIAL
    assert entry.to_record().slots_failed == (1,)


def test_a_silent_island_is_waited_for_until_the_deadline() -> None:
    book = make()
    direct(book)
    absorb(book, 0, report())
    assert book.settle(BOTH, START_S + 62.9) == []
    assert len(book.settle(BOTH, START_S + 63)) == 1


def test_with_a_quorum_an_island_that_hangs_holds_up_nobody() -> None:
    book = make()
    entry = book.direct(
        0,
        decision_id=7,
        policy="fixed_h",
        reason="fixed_h_reached",
        slots=(0, 1),
        now_s=START_S,
        deadline_s=START_S + 60,
        quorum=1,
    )
    assert book.settle(BOTH, START_S + 10) == []
    absorb(book, 0, report())
    assert book.settle(BOTH, START_S + 4.9) == []
    (closed,) = book.settle(BOTH, START_S + 5)
    assert (closed.id, outcome_of(closed)) == (entry.id, RoundOutcome.PARTIAL)
    absorb(book, 1, report(outcome=SyncOutcome.STALE))
    record = book.entries[0].to_record()
    assert (record.slots_applied, record.slots_late, record.slots_stale) == ((0,), (1,), (1,))


def test_slots_join_the_round_that_they_are_told_to_come_to() -> None:
    book = make()
    entry = direct(book)
    assert entry.told == {0, 1}
    later = book.direct(
        1,
        decision_id=8,
        policy="fixed_h",
        reason="fixed_h_reached",
        slots=(0, 1, 2),
        now_s=START_S,
        deadline_s=START_S + 60,
        directed=(1,),
    )
    assert later.told == {1}
    assert book.join(later, [2]).told == {1, 2}
    again = RoundBook(MemoryStore(), book.entries, num_applied=0, report_grace_s=3.0)
    assert again.entries[-1].told == {1, 2}


def test_a_round_that_failed_costs_nothing_and_is_tried_again_later() -> None:
    book = make()
    direct(book)
    for slot in (0, 1):
        absorb(book, slot, report(outcome=SyncOutcome.FAILED))
    (entry,) = book.settle(BOTH, START_S + 3)
    assert outcome_of(entry) is RoundOutcome.FAILED
    assert spend(book) == []
    assert book.version == 0
    assert book.retry_at_s() == START_S + 3 + RETRY_AFTER_S
    direct(book, now_s=START_S + 10)
    absorb(book, 0, report(started_s=START_S + 10, pushed_s=None, finished_s=START_S + 12))
    assert [e.round for e in book.entries] == [0, 0]
    assert book.open is not None
    assert book.open.reported == {0}


def test_a_report_after_the_close_still_counts() -> None:
    book = make()
    direct(book)
    book.settle(BOTH, START_S + 63)
    assert spend(book) == []
    absorb(book, 0, report())
    assert len(spend(book)) == 1
    assert book.entries[0].to_record().slots_applied == (0,)
    assert book.retry_at_s() is None


def test_an_island_that_is_past_the_round_is_not_waited_for() -> None:
    book = make()
    direct(book, 4)
    absorb(book, 0, report(4))
    assert book.settle({0: 5, 1: 4}, START_S + 3) == []
    assert len(book.settle({0: 5, 1: 5}, START_S + 3)) == 1


def test_a_report_of_a_later_round_answers_the_directive_that_it_obeyed() -> None:
    book = make()
    direct(book, 4)
    absorb(book, 0, report(4))
    absorb(book, 1, report(5, outcome=SyncOutcome.LATE))
    (entry,) = book.settle(BOTH, START_S + 3)
    assert (len(book.entries), entry.reported, book.version) == (1, frozenset({0, 1}), 6)


def test_repeated_reports_are_ignored() -> None:
    book = make()
    direct(book)
    assert absorb(book, 0, report()) is not None
    assert absorb(book, 0, report()) is None
    assert len(book.entries[0].reports) == 1


def test_islands_that_sync_by_themselves_make_a_round() -> None:
    book = make(counted_to=3)
    absorb(book, 0, report(3, autonomous=True))
    assert book.open is not None
    assert (book.open.reason, book.open.decision_id, book.open.expected) == (AUTONOMOUS, None, (0, 1))
    absorb(book, 1, report(3, autonomous=True, outcome=SyncOutcome.LATE))
    (entry,) = book.settle(BOTH, START_S + 4)
    assert outcome_of(entry) is RoundOutcome.PARTIAL
    assert entry.to_record().slots_late == (1,)
    assert len(spend(book)) == 1
    assert book.version == 4


def test_before_the_first_round_durations_are_assumed_or_unknown() -> None:
    assert make().expected_sync_s() == EXPECTED_SYNC_S
    assert make().last_transfer_s() is None
    assert make().retry_at_s() is None


def test_a_book_goes_on_where_the_journal_ends() -> None:
    book = make()
    direct(book)
    absorb(book, 0, report())
    again = RoundBook(MemoryStore(), book.entries, num_applied=0, report_grace_s=3.0)
    assert again.open == book.open
    assert again.version == 1
    assert absorb(again, 0, report()) is None
    assert direct(again, 1).id == 2


def numbers(entries: list[RoundEntry]) -> list[int]:
    return [entry.round for entry in entries]


def test_a_version_proves_the_rounds_that_nobody_reported() -> None:
    book = make()
    found = spend(book, 3)
    assert numbers(found) == [0, 1, 2]
    assert {entry.reason for entry in found} == {UNREPORTED}
    assert all(entry.closed_s is not None for entry in book.entries)
    assert spend(book, 3) == []
    assert (book.num_applied, book.retry_at_s()) == (3, None)


def test_late_reports_fill_in_a_round_that_was_counted_by_its_version() -> None:
    book = make()
    spend(book, 2)
    for round_ in (0, 1):
        for slot in (0, 1):
            absorb(book, slot, report(round_, started_s=START_S + slot))
    assert spend(book) == []
    assert [entry.to_record().slots_applied for entry in book.entries] == [(0, 1), (0, 1)]
    assert book.num_applied == 2


def test_a_directed_round_whose_islands_died_is_counted_by_the_version_that_appears() -> None:
    book = make()
    direct(book)
    (failed,) = book.settle({}, START_S + 3)
    assert outcome_of(failed) is RoundOutcome.FAILED
    assert spend(book, 0) == []
    (found,) = spend(book, 1)
    assert (found.id, found.reason) == (failed.id, "fixed_h_reached")
    absorb(book, 0, report())
    assert spend(book) == []


def test_a_late_report_proves_that_the_round_was_applied() -> None:
    book = make()
    direct(book)
    absorb(book, 0, report(outcome=SyncOutcome.LATE))
    absorb(book, 1, report(outcome=SyncOutcome.FAILED))
    book.settle(BOTH, START_S + 3)
    assert numbers(spend(book)) == [0]
    assert spend(book) == []


def test_counting_begins_at_the_first_version_that_is_told() -> None:
    book = make(counted_to=None)
    assert spend(book, 40) == []
    assert numbers(spend(book, 41)) == [40]


def test_a_retried_round_that_had_been_applied_after_all_counts_each_outer_step_once() -> None:
    book = make(counted_to=4)
    direct(book, 4)
    for slot in (0, 1):
        absorb(book, slot, report(4, SyncOutcome.FAILED))
    book.settle(BOTH, START_S + 3)
    direct(book, 4, now_s=START_S + 10)
    for slot in (0, 1):
        absorb(book, slot, report(5, started_s=START_S + 10, pushed_s=None, finished_s=START_S + 12))
    book.settle(BOTH, START_S + 13)
    assert len(spend(book)) == 2
    assert spend(book, 6) == []


def test_islands_that_tell_of_one_outer_step_under_two_directives_count_it_once() -> None:
    book = make(counted_to=4)
    direct(book, 4, slots=(0,))
    absorb(book, 0, report(4))
    book.settle({0: 5, 1: 4}, START_S + 3)
    assert len(spend(book)) == 1
    direct(book, 4, now_s=START_S + 10, slots=(1,))
    absorb(book, 1, report(4, started_s=START_S + 10, pushed_s=None, finished_s=START_S + 12))
    book.settle(BOTH, START_S + 13)
    assert spend(book) == []


def test_a_synchronizer_that_starts_again_from_zero_goes_on_costing_syncs() -> None:
    book = make()
    for era in range(2):
        for round_ in range(2 + era):
            start_s = START_S + 100 * era + 10 * round_
            direct(book, round_, now_s=start_s)
            for slot in (0, 1):
                absorb(book, slot, report(round_, started_s=start_s + 1, pushed_s=None, finished_s=start_s + 2))
            book.settle(BOTH, start_s + 3)
            assert numbers(spend(book)) == [round_]
    assert book.num_applied == 5


def test_counting_goes_on_where_the_journal_ends() -> None:
    store = MemoryStore()
    book = RoundBook(store, [], num_applied=0, report_grace_s=3.0, counted_to=0)
    spend(book, 2)
    again = RoundBook(
        MemoryStore(),
        book.entries,
        num_applied=int(str(store.rows["meta", "rounds_applied"])),
        report_grace_s=3.0,
        counted_to=int(str(store.rows["meta", "rounds_counted_to"])),
    )
    assert numbers(spend(again, 3)) == [2]
    assert again.num_applied == 3
