"""The journal in PostgreSQL: what is refused at start, what a failing server costs, and who may write."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count

import psycopg
import pytest

from controller import journal as journal_module
from controller.config import ControllerSettings
from controller.database_url import DatabaseUrl, parse_database_url
from controller.journal import Journal
from controller.journal_postgres import Database, PostgresStore
from controller.journal_store import Batch, FencedError
from service.errors import ConfigError, UnavailableError
from service.settings import load_settings
from tests.controller.conftest import DatabasePlace, append_decisions
from tests.controller.postgres import Server

SECRET = "s3cret@%/word"  # noqa: S105 - of a test server
ESCAPED = "s3cret%40%25%2Fword"


def free_url(server: Server) -> str:
    return server.url(server.make_database())


def with_wrong_password(server: Server) -> str:
    server.execute(f"DROP ROLE IF EXISTS locked; CREATE ROLE locked LOGIN PASSWORD '{SECRET}x'")
    return server.url(server.make_database(), user="locked", password=ESCAPED)


def with_nobody_listening(server: Server) -> str:
    return server.url("run").replace(f":{server.port}/", ":1/")


def with_unknown_host(server: Server) -> str:
    return server.url("run").replace("127.0.0.1", "no-such-host.invalid")


def with_no_such_database(server: Server) -> str:
    return server.url("nowhere")


def with_another_encoding(server: Server) -> str:
    return server.url(server.make_database(encoding="LATIN1"))


def with_no_permission(server: Server) -> str:
    server.execute("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN")
    return server.url(server.make_database(), user="stranger")


def with_read_permission(server: Server) -> str:
    name = server.make_database()
    Database(parse_database_url(server.url(name)))
    server.execute("DROP ROLE IF EXISTS watcher_of_runs; CREATE ROLE watcher_of_runs LOGIN")
    grants = "GRANT USAGE ON SCHEMA wadiloco TO watcher_of_runs; GRANT SELECT ON ALL TABLES IN SCHEMA wadiloco"
    server.execute(f"{grants} TO watcher_of_runs", database=name)
    return server.url(name, user="watcher_of_runs")


def with_another_application(server: Server) -> str:
    name = server.make_database()
    server.execute("CREATE SCHEMA wadiloco; CREATE TABLE wadiloco.customers (id INT)", database=name)
    return server.url(name)


def with_a_newer_version(server: Server) -> str:
    name = server.make_database()
    Database(parse_database_url(server.url(name)))
    server.execute("UPDATE wadiloco.schema_version SET version = 99", database=name)
    return server.url(name)


@pytest.mark.parametrize(
    ("make_url", "words"),
    [
        (with_wrong_password, "password authentication failed"),
        (with_nobody_listening, "refused"),
        (with_unknown_host, "no-such-host.invalid"),
        (with_no_such_database, 'database "nowhere" does not exist'),
        (with_another_encoding, "encoding is LATIN1"),
        (with_no_permission, "permission denied"),
        (with_read_permission, "permission denied"),
        (with_another_application, "another application"),
        (with_a_newer_version, "newer version"),
    ],
)
def test_a_database_that_cannot_work_is_refused_with_the_option_named(
    postgres_server: Server, make_url: Callable[[Server], str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Database(parse_database_url(make_url(postgres_server)))
    assert caught.value.field == "--journal"
    assert caught.value.remedy
    assert ESCAPED not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_password_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"postgresql://user:{ESCAPED}@db.example/run?sslmode=require&sslpassword=alsosecret"
    monkeypatch.setenv("WADILOCO_CONTROLLER_JOURNAL", url)
    with pytest.raises(SystemExit):
        load_settings(ControllerSettings, ["--print-config"])
    shown = capsys.readouterr().out
    assert "postgresql://user:***@db.example/run?sslmode=require" in shown
    settings = ControllerSettings.model_validate({"journal": url})
    everything = shown + repr(settings) + str(settings.journal) + settings.model_dump_json()
    assert not [word for word in (ESCAPED, SECRET, "alsosecret") if word in everything]
    assert isinstance(settings.journal, DatabaseUrl)
    assert settings.journal.get_secret_value() == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://user:hush@host/run", "no database that a journal can be in"),
        ("postgresql://user:hush@host", "no database is named"),
        ("postgresql://user:hush@host:port/run", "not a URL"),
        ("postgresql://user:hu@sh@host/run", "percent-encoded"),
        ("postgresql://user:hush@host/run#part", "not a URL"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_settings(ControllerSettings, ["--journal", url])
    assert "journal" in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "hu@sh" not in str(caught.value)


def test_two_controllers_may_start_on_an_empty_database_at_once(postgres_server: Server) -> None:
    url = parse_database_url(free_url(postgres_server))

    async def start_all() -> None:
        await asyncio.gather(*(asyncio.to_thread(Database, url) for _ in range(6)))

    asyncio.run(start_all())


def test_who_led_before_can_never_write_again(database: DatabasePlace) -> None:
    old = Journal(PostgresStore(database.database, term=1))
    new = PostgresStore(database.database, term=2)

    async def lose_the_lead() -> None:
        database.execute("UPDATE leader SET term = 1")
        old.put("meta", "epoch", "1")
        await old.commit()
        database.execute("UPDATE leader SET term = 2, batch = 0")
        new.write(Batch(number=1, target=1, state={"meta": {"epoch": "2"}}))
        for _ in range(2):
            old.put("meta", "epoch", "late")
            with pytest.raises(UnavailableError, match="another controller leads"):
                await old.commit()

    asyncio.run(lose_the_lead())
    assert old.fenced
    old.close()
    new.close()
    assert database.reader().meta()["epoch"] == "2"


def test_a_prune_is_fenced_too(database: DatabasePlace) -> None:
    store = PostgresStore(database.database, term=7)
    with pytest.raises(FencedError):
        store.prune("decisions", 1e9, limit=10)
    store.close()


def test_a_batch_that_was_written_although_nobody_said_so_is_not_written_twice(database: DatabasePlace) -> None:
    store = database.open_store()
    first = Batch(number=1, target=1, log={"samples": [("vllm-0", 1.0, "{}")]})
    second = Batch(number=2, target=2, log={"samples": [("vllm-0", 2.0, "{}")]})
    for batch in (first, first, second, second):
        store.write(batch)
    store.close()
    assert len(database.reader()._query("samples", "SELECT id FROM samples", ())) == 2


def test_a_server_that_restarts_costs_nothing_that_was_queued(
    postgres_server: Server, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.05)
    journal = Journal(database.open_store())

    async def live_through_it() -> int:
        append_decisions(journal, 1, 2)
        await journal.commit()
        postgres_server.kill()
        queued = await append_until_it_fails(journal, first=3)
        assert journal.failure is not None
        await asyncio.to_thread(postgres_server.start)
        while journal.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await journal.commit()
        return queued

    queued = asyncio.run(asyncio.wait_for(live_through_it(), 60))
    journal.close()
    found = [one.id for one in database.reader().decisions(since=0, limit=10_000)]
    assert found == list(range(1, queued + 1))


async def append_until_it_fails(journal: Journal, *, first: int) -> int:
    """A killed server's sessions live a moment longer; the last number that was queued."""
    for number in count(first):
        append_decisions(journal, number)
        try:
            await journal.commit()
        except UnavailableError:
            return number
    raise AssertionError


def test_a_session_that_is_ended_by_an_operator_is_replaced(postgres_server: Server, database: DatabasePlace) -> None:
    journal = Journal(database.open_store())

    async def write() -> None:
        append_decisions(journal, 1)
        await journal.commit()
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'wadiloco controller'"
        postgres_server.execute(end)
        append_decisions(journal, 2)
        await journal.commit()

    asyncio.run(asyncio.wait_for(write(), 20))
    journal.close()
    assert [one.id for one in database.reader().decisions(since=0, limit=9)] == [1, 2]


def test_a_permission_that_is_taken_away_is_a_counted_failure_and_made_up_for(
    postgres_server: Server, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.05)
    journal = Journal(database.open_store())

    async def live_through_it() -> None:
        database.execute("REVOKE ALL ON decisions FROM runner")
        append_decisions(journal, 1)
        with pytest.raises(UnavailableError, match="permission denied") as caught:
            await journal.commit()
        assert caught.value.field == "--journal"
        database.execute("GRANT ALL ON decisions TO runner")
        while journal.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(live_through_it(), 20))
    assert journal.num_failures >= 1
    journal.close()
    assert [one.id for one in database.reader().decisions(since=0, limit=9)] == [1]


def test_a_full_disk_is_a_counted_failure_and_made_up_for(
    postgres_server: Server, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of the backend's files is what a full disk is to it."""
    monkeypatch.setattr(journal_module, "RETRY_S", 0.05)
    journal = Journal(database.open_store())

    async def live_through_it() -> None:
        append_decisions(journal, 1)
        await journal.commit()
        with psycopg.connect(database.url) as connection:
            query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()"
            backends = [int(pid) for (pid,) in connection.execute(query)]
        for pid in backends:
            # Segments of its log are made in full before: their 16 MB must stay allowed.
            postgres_server.limit_files(pid, 17 << 20)
        for number in range(20):
            journal.append("samples", ("vllm-0", float(number), os.urandom(1 << 19).hex()))
        with pytest.raises(UnavailableError, match="could not"):
            await journal.commit()
        for pid in backends:
            postgres_server.limit_files(pid, None)
        while journal.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await journal.commit()

    asyncio.run(asyncio.wait_for(live_through_it(), 60))
    assert journal.num_failures >= 1
    journal.close()
    ((num,),) = database.reader()._query("samples", "SELECT count(*) FROM samples", ())
    assert num == 20
