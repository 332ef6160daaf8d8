"""The journal: one SQLite file (WAL) with everything that must survive a restart.

Two kinds of writes: *state* (`put`, one row per key, the newest wins) and *log* (`append`: samples, decisions). Both
only queue; one writer thread commits what is queued in one transaction, when somebody awaits `commit` or a tick does.
Whoever answers a request that changed state awaits `commit` first: a kill -9 loses nothing that was acknowledged.
``synchronous=NORMAL``: a power failure may lose the last commits, a killed process none.

When a commit fails (disk full, file gone read-only) the rows stay queued and are tried again every `RETRY_S`. State is
bounded by its keys; of the log the oldest rows are dropped beyond `MAX_QUEUED_ROWS`, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from pathlib import Path

from pydantic import BaseModel

from controller.journal_file import LOG_TABLES, STATE_TABLES, Lock, connect
from service.errors import UnavailableError

logger = logging.getLogger(__name__)

MAX_QUEUED_ROWS = 50_000
RETRY_S = 1.0
CLOSE_DEADLINE_S = 3.0
# A disk that hangs instead of failing must not hang the answers.
COMMIT_DEADLINE_S = 5.0

State = dict[tuple[str, str], BaseModel | str]
"""The newest value by table and key; models are immutable."""
LogRow = tuple[str, tuple[object, ...]]
Waiter = tuple[int, asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Journal:
    """Writes to the journal from the event loop; the thread does the waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock(path)
        try:
            self._connection = connect(path)
        except BaseException:
            self._lock.release()
            raise
        self._wake = threading.Condition()
        self._state: State = {}
        self._log: deque[LogRow] = deque()
        self._prune_before_s: float | None = None
        self._submitted = 0
        self._committed = 0
        self._requested = 0
        self._waiters: list[Waiter] = []
        self._closing = False
        self.failure: str | None = None
        self.num_failures = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        return len(self._state) + len(self._log)

    def put(self, table: str, key: str | int, value: BaseModel | str) -> None:
        """Queue the newest state of one key."""
        assert table in STATE_TABLES
        with self._wake:
            self._state[table, str(key)] = value
            self._submitted += 1

    def append(self, table: str, row: tuple[object, ...]) -> None:
        """Queue one row of a log."""
        assert table in LOG_TABLES
        with self._wake:
            self._log.append((table, row))
            self._submitted += 1
            self._bound_log()

    def prune(self, before_s: float) -> None:
        """Drop log rows from before this Unix time with the next commit."""
        with self._wake:
            self._prune_before_s = before_s

    async def commit(self) -> None:
        """Return once everything queued so far is on disk.

        Raises:
            UnavailableError: it cannot be written; it stays queued.
        """
        loop = asyncio.get_running_loop()
        with self._wake:
            if self._committed >= self._submitted:
                return
            done: asyncio.Future[None] = loop.create_future()
            self._waiters.append((self._submitted, loop, done))
            self._requested = self._submitted
            self._wake.notify()
        try:
            await asyncio.wait_for(done, COMMIT_DEADLINE_S)
        except TimeoutError as exc:
            raise self._unavailable(f"no answer from the disk within {COMMIT_DEADLINE_S:g} s") from exc

    def close(self) -> None:
        """Write what is queued, if it can be written, and close the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            logger.error("journal did not close in time path=%s", self.path)
        self._lock.release()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._requested > self._committed)
                closing = self._closing
                state, self._state = self._state, {}
                log, self._log = self._log, deque()
                prune_before_s, self._prune_before_s = self._prune_before_s, None
                target = self._submitted
            try:
                self._write(state, log, prune_before_s)
            except sqlite3.Error as exc:
                self._keep(state, log, exc)
                if not closing:
                    with self._wake:
                        self._wake.wait_for(lambda: self._closing, RETRY_S)
                    continue
            else:
                self._succeed(target)
            if closing:
                self._connection.close()
                return

    def _write(self, state: State, log: deque[LogRow], prune_before_s: float | None) -> None:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for (table, key), value in state.items():
                # Written out here and not when it was queued: of a round that a thousand islands report, once.
                body = value if isinstance(value, str) else value.model_dump_json()
                self._connection.execute(STATE_TABLES[table], (key, body))
            for table, row in log:
                self._connection.execute(LOG_TABLES[table], row)
            if prune_before_s is not None:
                for table in LOG_TABLES:
                    # The newest row stays: the next one's number is one higher, and readers go on by numbers.
                    old = f"t_s < ? AND id < (SELECT max(id) FROM {table})"  # noqa: S608
                    self._connection.execute(f"DELETE FROM {table} WHERE {old}", (prune_before_s,))  # noqa: S608

    def _succeed(self, target: int) -> None:
        with self._wake:
            if self.failure is not None:
                logger.info("journal writes again path=%s", self.path)
            self.failure = None
            self._committed = target
            ready = [waiter for waiter in self._waiters if waiter[0] <= target]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > target]
        for _, loop, done in ready:
            loop.call_soon_threadsafe(_resolve, done, None)

    def _keep(self, state: State, log: deque[LogRow], exc: sqlite3.Error) -> None:
        with self._wake:
            if self.failure is None:
                logger.error("journal cannot be written, keeping rows in memory path=%s error=%s", self.path, exc)
            self.failure = f"journal {self.path} cannot be written: {exc}"
            self.num_failures += 1
            self._state = state | self._state
            self._log.extendleft(reversed(log))
            self._bound_log()
            waiters, self._waiters = self._waiters, []
        for _, loop, done in waiters:
            loop.call_soon_threadsafe(_resolve, done, self._unavailable(str(exc)))

    def _bound_log(self) -> None:
        while len(self._log) > MAX_QUEUED_ROWS:
            self._log.popleft()
            self.num_dropped += 1

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self.path} cannot be written: {why}", field="--journal", remedy="free space on its disk; retried"
        )


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
