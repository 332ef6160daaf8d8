"""The journal: everything that must survive a restart, in one SQLite file or one PostgreSQL database.

Two kinds of writes: *state* (`put`, one row per key, the newest wins) and *log* (`append`: samples, decisions,
recoveries). Both only queue; one writer thread commits what is queued in one transaction, when somebody awaits `commit`
or a tick does. Whoever answers a request that changed state awaits `commit` first: a kill -9 loses nothing that was
acknowledged.

What was queued between two commits is one change or several, and goes into one transaction: the writer takes only what
a `commit` has sealed, so that no kill comes between the rows of one change.

When a commit fails (disk full, file gone read-only, database away) its batch is kept as it is and tried again every
`RETRY_S`; what comes meanwhile waits behind it. The same batch again, because a connection that breaks during COMMIT
leaves open whether it was written, and a store can tell by the batch's number. State is bounded by its keys; of each
log the oldest rows are dropped beyond `MAX_QUEUED_ROWS`, and counted. A disk that hangs instead is a failure, too, once
a commit has waited for `COMMIT_DEADLINE_S`, until the writer is through. A store that says that another controller
leads since is never written again.

Old rows are pruned in chunks, and a commit that waits comes between two of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from controller.journal_file import SqliteStore
from controller.journal_reader import Reader
from controller.journal_store import Batch, FencedError, State, Store
from controller.journal_tables import LOG_TABLES, STATE_TABLES, Row
from service.errors import UnavailableError
from service.threads import settle

logger = logging.getLogger(__name__)

MAX_QUEUED_ROWS = 50_000
RETRY_S = 1.0
CLOSE_DEADLINE_S = 3.0
# A disk that hangs instead of failing must not hang the answers.
COMMIT_DEADLINE_S = 5.0
# Some 20 ms of SQLite's time.
PRUNED_ROWS = 2000

Waiter = tuple[int, "asyncio.Future[None]"]


class Journal:
    """Writes to the journal from the event loop; the thread does the waiting."""

    def __init__(self, where: Path | Store) -> None:
        self._store: Store = SqliteStore(where) if isinstance(where, Path) else where
        self._wake = threading.Condition()
        self._state: State = {}
        self._log: dict[str, deque[Row]] = {}
        """Of the change that is being made; `_sealed` has those that are whole."""
        self._sealed_state: State = {}
        self._sealed_log: dict[str, deque[Row]] = {}
        self._pending: Batch | None = None
        """In the writer's hands, or waiting for another try."""
        self._num_batches = 0
        self._pruning: dict[str, float] = {}
        self._submitted = 0
        self._committed = 0
        self._requested = 0
        self._waiters: list[Waiter] = []
        self._closing = False
        self.failure: str | None = None
        self.fenced = False
        """Whether another controller leads since; what was queued is lost then, and nobody was told otherwise."""
        self.num_failures = 0
        self.num_dropped = 0
        self.num_pruned: Counter[str] = Counter()
        self.size_bytes = self._store.size_bytes()
        """As of the start, then of the last prune."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def num_queued(self) -> int:
        return sum(self._count_queued().values())

    def reader(self) -> Reader:
        return self._store.reader()

    def put(self, table: str, key: str | int, value: BaseModel | str) -> None:
        """Queue the newest state of one key."""
        self._set(table, str(key), value)

    def forget(self, table: str, key: str | int) -> None:
        """Queue the end of one key."""
        self._set(table, str(key), None)

    def _set(self, table: str, key: str, value: BaseModel | str | None) -> None:
        assert table in STATE_TABLES
        with self._wake:
            self._state.setdefault(table, {})[key] = value
            self._submitted += 1

    def append(self, table: str, row: Row) -> None:
        """Queue one row of a log."""
        assert table in LOG_TABLES
        with self._wake:
            log = self._log.setdefault(table, deque())
            log.append(row)
            self._submitted += 1
            sealed = self._sealed_log.get(table)
            if len(log) + len(sealed or ()) > MAX_QUEUED_ROWS:
                (sealed or log).popleft()
                self.num_dropped += 1

    def prune(self, before_s: Mapping[str, float]) -> None:
        """Drop rows of these logs from before these Unix times, soon and in chunks."""
        assert before_s.keys() <= LOG_TABLES.keys()
        with self._wake:
            self._pruning = dict(before_s)
            self._wake.notify()

    async def commit(self) -> None:
        """Return once everything queued so far is on disk.

        Raises:
            UnavailableError: it cannot be written; it stays queued, unless another controller leads.
        """
        with self._wake:
            if self.fenced:
                raise self._unavailable("another controller leads since")
            if self._committed >= self._submitted:
                return
            self._seal()
            waiter = self._submitted, asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self._wake.notify()
        try:
            await asyncio.wait_for(waiter[1], COMMIT_DEADLINE_S)
        except TimeoutError as exc:
            why = f"no answer within {COMMIT_DEADLINE_S:g} s"
            self._note_hang(waiter, why)
            raise self._unavailable(why) from exc

    def _seal(self) -> None:
        """All that is queued is whole: the writer may take it."""
        for table, values in self._state.items():
            self._sealed_state.setdefault(table, {}).update(values)
        for table, rows in self._log.items():
            self._sealed_log.setdefault(table, deque()).extend(rows)
        self._state, self._log = {}, {}
        self._requested = self._submitted

    def _note_hang(self, waiter: Waiter, why: str) -> None:
        """The writer is in the store, which neither writes nor fails."""
        with self._wake:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if self.failure is None and self._committed < waiter[0]:
                logger.error("journal hangs, keeping rows in memory journal=%s error=%s", self.name, why)
                self.failure = f"journal {self.name} hangs: {why}"
                self.num_failures += 1

    def close(self) -> None:
        """Write what is queued, if it can be written, and close the store."""
        self.close_soon()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            logger.error("journal did not close in time journal=%s", self.name)
            self._store.release()

    def close_soon(self) -> None:
        """As `close`, without waiting for it."""
        with self._wake:
            self._seal()
            self._closing = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                closing = self._closing
                batch = self._take()
            failed = not self._commit(batch)
            if not failed:
                self._prune_some()
            # What was never sealed may be half a change: it is reported, and keeps nobody waiting.
            if closing and (failed or self._committed >= self._requested):
                self._report_lost()
                self._store.close()
                return
            if failed and not self.fenced:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _report_lost(self) -> None:
        """What a stop leaves unwritten, since it cannot be written."""
        lost = self._count_queued()
        if lost.total():
            logger.error(
                "journal closes with rows that cannot be written journal=%s %s error=%s",
                self.name,
                " ".join(f"{table}={count}" for table, count in sorted(lost.items())),
                self.failure,
            )

    def _count_queued(self) -> Counter[str]:
        """Rows by table that are not written yet."""
        queued: Counter[str] = Counter()
        pending = self._pending
        for queue in (
            *(self._state, self._log, self._sealed_state, self._sealed_log),
            *((pending.state, pending.log) if pending is not None else ()),
        ):
            queued.update({table: len(rows) for table, rows in queue.items()})
        return queued

    def _has_work(self) -> bool:
        wanted = not self.fenced and (self._requested > self._committed or bool(self._pruning))
        return self._closing or wanted

    def _take(self) -> Batch:
        """The batch that is still to be written, or one of everything that is sealed."""
        if self._pending is None:
            self._num_batches += 1
            self._pending = Batch(
                number=self._num_batches, target=self._requested, state=self._sealed_state, log=self._sealed_log
            )
            self._sealed_state, self._sealed_log = {}, {}
        return self._pending

    def _commit(self, batch: Batch) -> bool:
        if self.fenced:
            return False
        try:
            if batch.num_rows:
                self._store.write(batch)
        except FencedError as exc:
            self._give_up(batch, exc)
            return False
        except Exception as exc:  # noqa: BLE001 - a row that a driver cannot take must not end the thread
            self._keep(batch, exc)
            return False
        self._succeed(batch)
        return True

    def _succeed(self, batch: Batch) -> None:
        with self._wake:
            if self.failure is not None:
                logger.info("journal writes again journal=%s", self.name)
            self.failure = self._pending = None
            self._committed = batch.target
            ready = [waiter for waiter in self._waiters if waiter[0] <= batch.target]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > batch.target]
        for _, done in ready:
            settle(done, partial(done.set_result, None))

    def _keep(self, batch: Batch, exc: Exception) -> None:
        with self._wake:
            if self.failure is None:
                logger.error("journal cannot be written, keeping rows in memory journal=%s error=%s", self.name, exc)
            self.failure = f"journal {self.name} cannot be written: {exc}"
            self.num_failures += 1
        self._refuse_waiters(str(exc))

    def _give_up(self, batch: Batch, exc: FencedError) -> None:
        with self._wake:
            logger.error("journal belongs to another controller now journal=%s lost_rows=%d", self.name, batch.num_rows)
            self.failure = f"journal {self.name} cannot be written: {exc}"
            self.num_failures += 1
            self.fenced, self._pending = True, None
            self._state, self._log, self._sealed_state, self._sealed_log = {}, {}, {}, {}
        self._refuse_waiters(str(exc))

    def _refuse_waiters(self, why: str) -> None:
        with self._wake:
            waiters, self._waiters = self._waiters, []
        for _, done in waiters:
            settle(done, partial(done.set_exception, self._unavailable(why)))

    def _prune_some(self) -> None:
        """One chunk; a table that has no more is done with, and after the last one space is given back."""
        with self._wake:
            table, before_s = next(iter(self._pruning.items()), ("", 0.0))
        if not table:
            return
        try:
            num = self._store.prune(table, before_s, limit=PRUNED_ROWS)
            self.num_pruned[table] += num
            is_last = len(self._pruning) == 1
            done = num < PRUNED_ROWS and not (is_last and self._store.tidy())
            if done and is_last:
                self.size_bytes = self._store.size_bytes()
        except Exception as exc:  # noqa: BLE001 - as for a commit
            self.num_failures += 1
            logger.warning("journal cannot be pruned, trying again later journal=%s error=%s", self.name, exc)
            with self._wake:
                if self._pruning.get(table) == before_s:  # an order that came meanwhile goes on
                    self._pruning = {}
        else:
            with self._wake:
                if done and self._pruning.get(table) == before_s:
                    del self._pruning[table]

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(f"{self.name} cannot be written: {why}", field="--journal", remedy=self._store.remedy)
