"""The lock of the leader in PostgreSQL, and the number of its lead.

The lock is an advisory one of a session of its own. The server ends that session, and with it the lock, when the
process dies (its socket closes) or when it is silent for ``failover_s`` (``idle_session_timeout``: a stopped process, a
host or network that went away), by the server's clock alone. Who gets the lock raises the term, unless it was the last
leader itself and nobody led in between.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection

from controller.journal_postgres import LOCK_CLASS, Database
from controller.journal_store import StoreError

_ENDED = "the session that held the lock has ended"
_TRY = f"SELECT pg_try_advisory_lock({LOCK_CLASS}, 1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a try for the lead gave."""

    won: bool
    term: int
    """Of the leader that there is now."""
    holder: str
    url: str | None


class LeaderLock:
    """One session. Its calls block, one at a time; after an error only `close` makes sense."""

    def __init__(self, database: Database, *, holder: str, url: str | None, failover_s: float) -> None:
        self.name = database.name
        self._database = database
        self._holder = holder
        self._url = url
        self._engine = database.engine(statement_s=failover_s, size=1, idle_session_s=failover_s)
        self._connection: Connection | None = None
        self._backend = 0
        self._has_lock = False
        self._why_ended = _ENDED
        self._mutex = threading.Lock()

    def connect(self) -> None:
        """Raises `StoreError`, as all others do."""
        with self._mutex, self._database.mapped():
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._backend = int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
            self._connection = connection

    def try_win(self, last_term: int | None) -> Standing:
        """Take the lock if nobody has it; ``last_term`` is that of this process, if it led before."""
        with self._session() as connection:
            won = bool(connection.exec_driver_sql(_TRY).scalar_one())
            self._has_lock = won
            found = connection.exec_driver_sql("SELECT term, holder, url FROM leader").one()
            if not won or (found.term == last_term and found.holder == self._holder):
                return Standing(won=won, term=found.term, holder=found.holder, url=found.url)
            term = connection.exec_driver_sql(
                "UPDATE leader SET term = term + 1, batch = 0, holder = %s, url = %s RETURNING term",
                (self._holder, self._url),
            ).scalar_one()
            return Standing(won=True, term=int(term), holder=self._holder, url=self._url)

    def ping(self) -> None:
        """Prove that this very session lives and has the lock; the server counts its silence anew."""
        if not self._has_lock:  # outside of the session: that of a standby goes on
            raise StoreError("this session does not have the lock")
        with self._session() as connection:
            backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            if backend != self._backend:
                raise StoreError(_ENDED)

    def close(self) -> None:
        """Let go of the lock; waits for a call that hangs."""
        with self._mutex:
            self._end()
            self._engine.dispose()

    @contextlib.contextmanager
    def _session(self) -> Iterator[Connection]:
        """The session, which does not survive an error: a new one behind the same name would not have the lock."""
        with self._mutex, self._database.mapped():
            if self._connection is None:
                raise StoreError(self._why_ended)
            try:
                yield self._connection
            except Exception as exc:
                self._why_ended = self._database.explain(exc)
                self._end()
                raise

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
