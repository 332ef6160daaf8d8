"""One contract, each database: what is queued is written, what was acknowledged survives, what fails is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from controller import journal as journal_module
from controller.journal import Journal
from controller.journal_reader import PageRow, SampleRow
from controller.journal_store import Batch, Store
from controller.journal_tables import decision_row, recovery_row
from controller.records import RoundEntry
from controller.schema import PolicySpec, Recovery, RecoveryKind, RecoveryRecord
from service.errors import UnavailableError
from sidecar.schema import LoadSample
from tests.controller.conftest import Place, append_decisions, decision
from tests.controller.helpers import sample


@contextmanager
def opened(place: Place) -> Iterator[Journal]:
    journal = Journal(place.open_store())
    try:
        yield journal
    finally:
        journal.close()


def append_sample(journal: Journal, t_s: float, server_id: str = "vllm-0") -> LoadSample:
    one = LoadSample.model_validate(sample(server_id, t_s))
    journal.append("samples", (server_id, t_s, one.model_dump_json(exclude_none=True)))
    return one


def recovery(number: int) -> Recovery:
    return Recovery(t_s=float(number), kind=RecoveryKind.LEFT, agent_id="a", slot=None, epoch=1, recovery=number)


def round_entry(number: int) -> RoundEntry:
    text = {"policy": "fixed_h", "reason": "fixed_h_reached"}
    times = {"directed_s": 1.0, "opened_s": 1.0, "deadline_s": 2.0}
    return RoundEntry.model_validate(
        {"id": number, "round": number, "decision_id": 1, "expected": (0,), **text, **times}
    )


def test_the_newest_state_and_every_decision_are_read_back(place: Place) -> None:
    async def write(journal: Journal) -> None:
        for h in (100, 200):
            journal.put("policy", "current", PolicySpec(name="fixed_h", params={"h": h}))
        append_decisions(journal, 1, 2, 3)
        await journal.commit()

    reader = place.reader()
    with opened(place) as journal:
        asyncio.run(write(journal))
        assert reader.values("policy", PolicySpec) == [PolicySpec(name="fixed_h", params={"h": 200})]
        assert reader.decisions(since=1, limit=10) == [decision(2, 2.0), decision(3, 3.0)]
        assert reader.decisions(since=0, limit=1) == [decision(1, 1.0)]
        assert reader.last_id("decisions") == 3


def test_an_empty_journal_reads_as_empty(place: Place) -> None:
    with opened(place):
        reader = place.reader()
        assert (reader.meta(), reader.last_id("decisions")) == ({}, 0)
        assert reader.values("policy", PolicySpec) == []
        assert [reader.page(t, since=0, limit=9) for t in ("samples", "decisions", "recoveries", "rounds")] == [[]] * 4


def test_what_is_queued_is_written_when_the_journal_closes(place: Place) -> None:
    with opened(place) as journal:
        journal.put("meta", "epoch", "7")
    assert place.reader().meta()["epoch"] == "7"


def test_any_text_comes_back_as_it_was(place: Place) -> None:
    text = "ünïcødé 模型 🙂 ' \" \\ %s ? \n\t"
    with opened(place) as journal:
        journal.put("meta", text, text)
    assert place.reader().meta() == {text: text}


def test_a_key_that_is_forgotten_is_gone_and_can_come_back(place: Place) -> None:
    async def write(journal: Journal) -> None:
        for key in ("a", "b", "c"):
            journal.put("meta", key, "1")
        await journal.commit()
        for key in ("a", "b", "never seen"):
            journal.forget("meta", key)
        journal.put("meta", "b", "2")
        await journal.commit()

    with opened(place) as journal:
        asyncio.run(write(journal))
        assert place.reader().meta() == {"b": "2", "c": "1"}


def test_a_decision_is_known_with_its_island_and_its_shadow(place: Place) -> None:
    told = [decision(1, slot=None, shadow=False), decision(2, slot=0, shadow=True), decision(3, slot=4095)]
    with opened(place) as journal:
        for one in told:
            journal.append("decisions", decision_row(one))
    assert place.reader().decisions(since=0, limit=9) == told


def test_the_newest_rounds_are_those_with_the_highest_numbers(place: Place) -> None:
    with opened(place) as journal:
        for number in (1, 2, 9, 10, 11):
            journal.put("rounds", number, round_entry(number))
    reader = place.reader()
    assert [entry.id for entry in reader.values("rounds", RoundEntry, newest=3)] == [11, 10, 9]
    assert [entry.id for entry in reader.values("rounds", RoundEntry)] == [11, 10, 9, 2, 1]


def test_pages_of_each_table_have_typed_rows_in_the_order_of_their_numbers(place: Place) -> None:
    with opened(place) as journal:
        append_decisions(journal, *range(1, 12))
        samples = [append_sample(journal, float(second)) for second in range(1, 12)]
        for number in range(1, 12):
            journal.put("rounds", number, round_entry(number))
            journal.append("recoveries", recovery_row(recovery(number)))
    reader = place.reader()
    for table, kind in (("rounds", RoundEntry), ("samples", SampleRow), ("recoveries", RecoveryRecord)):
        seen: list[PageRow] = []
        while page := reader.page(table, since=seen[-1].id if seen else 0, limit=4):
            assert len(page) <= 4
            seen += page
        assert all(isinstance(row, kind) for row in seen)
        assert [row.id for row in seen] == sorted({row.id for row in seen})
        assert len(seen) == 11
    assert [row.id for row in reader.page("decisions", since=9, limit=9)] == [10, 11]
    assert [row.sample for row in reader.page("samples", since=0, limit=99) if isinstance(row, SampleRow)] == samples
    assert list(reader.samples(page=3)) == samples
    (first, *_) = reader.page("recoveries", since=0, limit=1)
    assert first == RecoveryRecord(id=first.id, **recovery(1).model_dump())
    for table in ("decisions", "rounds", "recoveries"):
        last = reader.last_id(table)
        assert reader.last_of_page(table, since=0, limit=99) == last
        assert reader.last_of_page(table, since=last, limit=99) == last
        assert reader.last_of_page(table, since=0, limit=2) == reader.page(table, since=0, limit=2)[-1].id
        assert [row.id for row in reader.page(table, since=reader.before_newest(table, 2), limit=2)] == [10, 11]
        assert reader.before_newest(table, 99) == 0


def test_the_newest_rows_are_as_many_as_wanted_over_a_hole_in_their_ids(place: Place) -> None:
    with opened(place) as journal:
        append_decisions(journal, 1, 2, 3, 7, 8)
    reader = place.reader()
    since = reader.before_newest("decisions", 4)
    assert [row.id for row in reader.page("decisions", since=since, limit=4)] == [2, 3, 7, 8]


def test_old_rows_of_each_log_are_pruned_in_chunks_by_its_own_age(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PRUNED_ROWS", 3)

    async def write(journal: Journal) -> None:
        append_decisions(journal, *range(1, 11))
        for second in range(1, 11):
            append_sample(journal, float(second))
        await journal.commit()
        journal.prune({"samples": 9.5, "decisions": 4.5, "recoveries": 4.5})
        while journal._pruning:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    with opened(place) as journal:
        asyncio.run(asyncio.wait_for(write(journal), 20))
        assert journal.num_pruned == {"samples": 9, "decisions": 4, "recoveries": 0}
        assert journal.size_bytes is not None
        assert journal.size_bytes > 0
    reader = place.reader()
    assert [kept.id for kept in reader.decisions(since=0, limit=99)] == list(range(5, 11))
    assert [kept.t_s for kept in reader.samples()] == [10.0]


def test_the_newest_row_of_a_log_stays_however_old_it_is(place: Place) -> None:
    """The next one's number is one higher, and readers go on by numbers."""
    with opened(place) as journal:
        append_decisions(journal, 1, 2, 3)
        journal.prune({"decisions": 1e9})
    assert [kept.id for kept in place.reader().decisions(since=0, limit=9)] == [3]


class Recording:
    """A store that notes down what it is asked, and lets the first prune wait."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[str] = []
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def write(self, batch: Batch) -> None:
        self.calls.append("write")
        self._store.write(batch)

    def prune(self, table: str, before_s: float, *, limit: int) -> int:
        self.calls.append("prune")
        self.go_on.wait(20)
        return self._store.prune(table, before_s, limit=limit)


def test_a_commit_waits_for_one_chunk_of_a_prune_and_not_for_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "PRUNED_ROWS", 1)
    store = Recording(place.open_store())
    journal = Journal(store)  # type: ignore[arg-type]

    async def write() -> None:
        append_decisions(journal, *range(1, 201))
        await journal.commit()
        journal.prune({"decisions": 1e9})
        while "prune" not in store.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        journal.put("meta", "epoch", "1")
        committing = asyncio.create_task(journal.commit())
        await asyncio.sleep(0)
        store.go_on.set()
        await committing

    asyncio.run(asyncio.wait_for(write(), 20))
    journal.close()
    assert store.calls[:3] == ["write", "prune", "write"]


def test_a_failing_commit_is_told_kept_and_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)

    async def write(journal: Journal) -> None:
        mend = place.break_writes()
        journal.put("meta", "epoch", "1")
        append_sample(journal, 1.0)
        with pytest.raises(UnavailableError) as caught:
            await journal.commit()
        assert caught.value.field == "--journal"
        assert journal.failure is not None
        assert journal.num_failures >= 1
        journal.put("meta", "epoch", "2")
        append_sample(journal, 2.0)
        mend()
        while journal.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await journal.commit()

    with opened(place) as journal:
        asyncio.run(asyncio.wait_for(write(journal), 20))
    reader = place.reader()
    assert reader.meta()["epoch"] == "2"
    assert [kept.t_s for kept in reader.samples()] == [1.0, 2.0]


def break_behind_a_batch(place: Place, journal: Journal) -> Callable[[], None]:
    """One batch has failed, and more is queued behind it; returns what lets writes work again."""
    mend = place.break_writes()
    append_sample(journal, 1.0)
    with pytest.raises(UnavailableError):
        asyncio.run(journal.commit())
    append_sample(journal, 2.0)
    journal.put("meta", "epoch", "2")
    return mend


def test_what_was_queued_behind_a_failed_batch_is_written_when_the_journal_closes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 60.0)
    with opened(place) as journal:
        mend = break_behind_a_batch(place, journal)
        mend()
    reader = place.reader()
    assert [kept.t_s for kept in reader.samples()] == [1.0, 2.0]
    assert reader.meta()["epoch"] == "2"


def test_what_a_stop_leaves_unwritten_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 60.0)
    with opened(place) as journal:
        mend = break_behind_a_batch(place, journal)
    mend()
    (told,) = [record.getMessage() for record in caplog.records if "journal closes" in record.getMessage()]
    assert "rows that cannot be written" in told
    assert " meta=1 samples=2 error=" in told


def test_while_writes_fail_each_log_is_bounded_alone_and_losses_are_counted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_QUEUED_ROWS", 10)
    monkeypatch.setattr(journal_module, "RETRY_S", 60.0)

    async def write(journal: Journal) -> None:
        append_decisions(journal, 1)
        for second in range(1, 16):
            append_sample(journal, float(second))
        journal.put("meta", "epoch", "1")
        with pytest.raises(UnavailableError):
            await journal.commit()

    with opened(place) as journal:
        mend = place.break_writes()
        asyncio.run(write(journal))
        assert (journal.num_dropped, journal.num_queued) == (5, 12)
        mend()
    reader = place.reader()
    assert [kept.t_s for kept in reader.samples()] == [float(second) for second in range(6, 16)]
    assert [kept.id for kept in reader.decisions(since=0, limit=9)] == [1]
    assert reader.meta()["epoch"] == "1"


def test_a_row_that_no_database_can_take_is_a_counted_failure_and_ends_nothing(place: Place) -> None:
    async def write(journal: Journal) -> None:
        journal.put("meta", "epoch", "half of a pair: \ud800")
        with pytest.raises(UnavailableError):
            await journal.commit()
        assert journal.num_failures >= 1
        assert journal._thread.is_alive()

    with opened(place) as journal:
        asyncio.run(asyncio.wait_for(write(journal), 20))
