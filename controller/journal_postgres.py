"""The journal in one PostgreSQL database: opening with clear errors, writing behind the fence, reading.

All tables are in the schema `SCHEMA`, so that the database may serve others too; one database holds one run. Every
session has deadlines of its own (a server that hangs, a network that swallows packets), and idle transactions end by
the server's clock: a controller that was stopped in the middle of one holds its locks no longer than `IDLE_S`.

**The fence.** The row ``leader`` holds the *term*, a number that grows with every change of leader, and the number of
the last batch of that term. Each writing transaction first locks the row and compares the term: a leader that lost its
lead and does not know it cannot write. A batch whose number is there already was written, although its COMMIT was never
answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from psycopg.errors import Error as DriverError
from sqlalchemy import Connection, Engine, create_engine, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from controller.database_url import DatabaseUrl
from controller.journal_reader import Reader
from controller.journal_store import Batch, FencedError, StoreError
from controller.journal_tables import LOG_TABLES, ROUND_NUMBER, SCHEMA_VERSION, STATE_TABLES, Row, oldest_rows
from service.errors import ConfigError

SCHEMA = "wadiloco"
LOCK_CLASS = 0x57444C43
"""Of our advisory locks in the database ("WDLC"): 1 is the leader's, 2 that of a migration."""
OLDEST_SERVER = 140000
"""PostgreSQL 14 brought idle_session_timeout, by which a leader that hangs loses its lock."""
CONNECT_S = 3
WRITE_S = 4.0
"""Below `controller.journal.COMMIT_DEADLINE_S`: the server gives up before the one who waits."""
READ_S = 60.0
IDLE_S = 3.0
MIGRATE_S = 600.0
NETWORK = {"keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""A peer that vanished is known to after 11 s of silence."""
UNACKNOWLEDGED_MS = 8000

_TABLES = f"""
CREATE TABLE samples (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, server_id TEXT NOT NULL, t_s DOUBLE PRECISION NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX samples_by_time ON samples (t_s);
CREATE TABLE decisions (
    id BIGINT PRIMARY KEY, t_s DOUBLE PRECISION NOT NULL, policy TEXT NOT NULL, action TEXT NOT NULL,
    reason TEXT NOT NULL, round BIGINT NOT NULL, slots TEXT NOT NULL, terms TEXT NOT NULL,
    slot BIGINT, shadow BOOLEAN NOT NULL DEFAULT false
);
CREATE INDEX decisions_by_time ON decisions (t_s);
CREATE TABLE recoveries (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, t_s DOUBLE PRECISION NOT NULL, slot BIGINT,
    agent_id TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX recoveries_by_time ON recoveries (t_s);
{"".join(f"CREATE TABLE {name} (key TEXT PRIMARY KEY, body TEXT NOT NULL);" for name in STATE_TABLES)}
CREATE INDEX rounds_by_number ON rounds (({ROUND_NUMBER}));
CREATE TABLE leader (
    id INTEGER PRIMARY KEY CHECK (id = 1), term BIGINT NOT NULL, batch BIGINT NOT NULL, holder TEXT NOT NULL,
    url TEXT
);
INSERT INTO leader VALUES (1, 0, 0, '', NULL);
CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO schema_version VALUES (0);
"""  # noqa: S608 - our own names


# One statement takes all rows of a table, as one array per column. In the binary form (%b): for 10,000 samples of 2 KB
# that is 0.4 s against 4 s in text, which the driver quotes sign by sign, and 0.2 s of a COPY, which cannot upsert.


def _upsert(table: str) -> str:
    return (
        f"INSERT INTO {table} (key, body) SELECT * FROM unnest(%b::text[], %b::text[])"  # noqa: S608 - our own names
        " ON CONFLICT (key) DO UPDATE SET body = excluded.body"
    )


def _insert(table: str) -> str:
    columns = LOG_TABLES[table]
    arrays = ", ".join(f"%b::{kind}[]" for kind in columns.values())
    renewed = ", ".join(f"{name} = excluded.{name}" for name in columns)
    again = f" ON CONFLICT (id) DO UPDATE SET {renewed}" if "id" in columns else ""
    return f"INSERT INTO {table} ({', '.join(columns)}) SELECT * FROM unnest({arrays}){again}"  # noqa: S608


_UPSERTS = {table: _upsert(table) for table in STATE_TABLES}
_INSERTS = {table: _insert(table) for table in LOG_TABLES}


class Database:
    """One database that was found to be usable; makes the connections to it."""

    def __init__(self, url: DatabaseUrl) -> None:
        """Look at the database and make or migrate its tables.

        Raises:
            ConfigError: it cannot be reached, logged in to, read or written, is another application's, or a newer
                version wrote it.
        """
        self.url = url
        self.name = str(url)
        with self._refusing():
            engine = self.engine(statement_s=MIGRATE_S, size=1)
            try:
                with engine.begin() as connection:
                    self._prepare(connection)
            finally:
                engine.dispose()

    def engine(self, *, statement_s: float, size: int, read_only: bool = False, idle_session_s: float = 0) -> Engine:
        """Connections whose every wait ends; what breaks is replaced by the next use."""
        session = {
            "search_path": SCHEMA,
            "client_encoding": "UTF8",
            "statement_timeout": _ms(statement_s),
            "lock_timeout": _ms(min(statement_s, WRITE_S)),
            "idle_in_transaction_session_timeout": _ms(IDLE_S),
            "idle_session_timeout": _ms(idle_session_s),
            "default_transaction_read_only": "on" if read_only else "off",
        }
        arguments: dict[str, Any] = {
            **NETWORK,
            "tcp_user_timeout": UNACKNOWLEDGED_MS,
            "connect_timeout": CONNECT_S,
            "application_name": "wadiloco controller",
            "options": " ".join(f"-c {key}={value}" for key, value in session.items()),
        }
        url = make_url(self.url.get_secret_value()).set(drivername="postgresql+psycopg")
        return create_engine(
            url,
            pool_size=size,
            max_overflow=0,
            pool_timeout=statement_s,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args=arguments,
        )

    def reader(self) -> PostgresReader:
        return PostgresReader(self)

    def explain(self, exc: BaseException) -> str:
        """What the server said, in one line, without a password."""
        said = str(exc.orig) if isinstance(exc, DBAPIError) else str(exc)
        line = " ".join(said.split()) or type(exc).__name__
        for secret in self.url.secrets:
            line = line.replace(secret, "***")
        return line

    @contextlib.contextmanager
    def mapped(self) -> Iterator[None]:
        """Errors of the driver as `StoreError`."""
        try:
            yield
        except (SQLAlchemyError, DriverError) as exc:
            raise StoreError(self.explain(exc)) from exc

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, DriverError) as exc:
            raise self._cannot_use(
                self.explain(exc), "check that it runs, and host, database, user and password"
            ) from None

    def _prepare(self, connection: Connection) -> None:
        """Nothing is written before it is known that it can be and whose it is."""
        self._check_server(connection)
        # Two controllers may start at once.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_CLASS}, 2)")
        found = {str(name) for (name,) in connection.exec_driver_sql(_FIND_TABLES, (SCHEMA,))}
        if not found and connection.exec_driver_sql(_FIND_SCHEMA, (SCHEMA,)).scalar_one() is None:
            connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA}")
        elif found and "schema_version" not in found:
            raise self._cannot_use(
                f"its schema {SCHEMA} is another application's", "name the journal of this run, or an empty database"
            )
        version = _scalar(connection, "SELECT version FROM schema_version") if found else 0
        if version > SCHEMA_VERSION:
            raise self._cannot_use(
                f"a newer version wrote it (schema {version}, this one knows {SCHEMA_VERSION})",
                "use the newer version, or another database",
            )
        if version < SCHEMA_VERSION:
            connection.exec_driver_sql(_TABLES)  # PostgreSQL begins with version 2
            connection.exec_driver_sql("UPDATE schema_version SET version = %s", (SCHEMA_VERSION,))
            _compress_fast(connection)
        # A user who may read and not write is found out now, not with the first round.
        connection.exec_driver_sql("UPDATE leader SET id = id")
        connection.exec_driver_sql("INSERT INTO meta VALUES ('probe', '') ON CONFLICT DO NOTHING")
        connection.exec_driver_sql("DELETE FROM meta WHERE key = 'probe'")

    def _check_server(self, connection: Connection) -> None:
        if _scalar(connection, "SELECT current_setting('server_version_num')::int") < OLDEST_SERVER:
            raise self._cannot_use("its server is older than PostgreSQL 14", "use a newer one")
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
        if encoding != "UTF8":
            raise self._cannot_use(f"its encoding is {encoding}", "create it with ENCODING 'UTF8' TEMPLATE template0")
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar_one():
            raise self._cannot_use("its server is a read-only replica", "name the primary")

    def _cannot_use(self, why: str, remedy: str) -> ConfigError:
        return ConfigError(f"cannot use {self.name}: {why}", field="--journal", remedy=remedy)


_FIND_SCHEMA = "SELECT to_regnamespace(%s)"
_FIND_TABLES = "SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = %s"
_SIZE = (
    "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
    " WHERE relkind = 'r' AND relnamespace = %s::regnamespace"
)


class PostgresStore:
    """The database, opened for writing by the leader of one term."""

    remedy = "check the database server and the network; retried"

    def __init__(self, database: Database, *, term: int) -> None:
        self.name = database.name
        self._database = database
        self._term = term
        self._engine = database.engine(statement_s=WRITE_S, size=1)
        self._reader = database.reader()

    def reader(self) -> Reader:
        return self._reader

    def write(self, batch: Batch) -> None:
        with self._fenced(batch.number) as connection:
            if connection is None:
                return
            for table in batch.state:
                kept, gone = batch.kept(table), batch.gone(table)
                if kept:
                    connection.exec_driver_sql(_UPSERTS[table], (list(kept), list(kept.values())))
                if gone:
                    connection.exec_driver_sql(f"DELETE FROM {table} WHERE key = ANY(%s)", (gone,))  # noqa: S608
            for table, log in batch.log.items():
                columns = [list(column) for column in zip(*log, strict=True)]
                connection.exec_driver_sql(_INSERTS[table], tuple(columns))

    def prune(self, table: str, before_s: float, *, limit: int) -> int:
        delete = f"DELETE FROM {table} WHERE id IN ({oldest_rows(table)})".replace("?", "%s")  # noqa: S608
        with self._fenced() as connection:
            assert connection is not None
            return connection.exec_driver_sql(delete, (before_s, limit)).rowcount

    def tidy(self) -> bool:
        return False  # The server's autovacuum does it.

    def size_bytes(self) -> int | None:
        with contextlib.suppress(StoreError), self._database.mapped(), self._engine.begin() as connection:
            return _scalar(connection, _SIZE, (SCHEMA,))
        return None

    def close(self) -> None:
        self._reader.close()
        self._engine.dispose()

    def release(self) -> None:
        """The fence keeps a hanging writer out."""

    @contextlib.contextmanager
    def _fenced(self, number: int | None = None) -> Iterator[Connection | None]:
        """A transaction of the leader; no connection when the batch was written before."""
        with self._database.mapped(), self._engine.begin() as connection:
            found = connection.exec_driver_sql("SELECT term, batch FROM leader FOR UPDATE").one()
            if found.term != self._term:
                raise FencedError(f"another controller leads since (term {found.term}, this one had {self._term})")
            if number is not None and found.batch >= number:
                yield None
                return
            yield connection
            if number is not None:
                connection.exec_driver_sql("UPDATE leader SET batch = %s", (number,))


class PostgresReader(Reader):
    """Reads from connections of its own, in transactions that cannot write."""

    _remedy = "check the database server and the network"

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engine = database.engine(statement_s=READ_S, size=4, read_only=True)

    def close(self) -> None:
        self._engine.dispose()

    def _query(self, table: str, sql: str, arguments: Row) -> list[Row]:
        del table
        try:
            with self._database.mapped(), self._engine.begin() as connection:
                rows = connection.exec_driver_sql(sql.replace("?", "%s"), arguments or None).all()
        except StoreError as exc:
            raise self._unreadable(str(exc)) from exc
        return [tuple(row) for row in rows]


def _compress_fast(connection: Connection) -> None:
    """Bodies are some 2 KB of JSON, over which the built-in method takes ten times as long as lz4."""
    known = "SELECT 'lz4' = ANY(enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
    if connection.exec_driver_sql(known).scalar_one():
        for table in ("samples", *STATE_TABLES):
            connection.exec_driver_sql(f"ALTER TABLE {table} ALTER COLUMN body SET COMPRESSION lz4")


def _scalar(connection: Connection, sql: str, arguments: Row | None = None) -> int:
    return int(connection.exec_driver_sql(sql, arguments).scalar_one())


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
