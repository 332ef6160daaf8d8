"""Who leads: one at a time, told by the database's clock, and never by a process that only believes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from controller import journal_postgres
from controller.contender import Contender
from controller.database_url import parse_database_url
from controller.journal_postgres import Database, PostgresStore
from controller.journal_store import Batch, FencedError, StoreError
from controller.leader_lock import LeaderLock
from controller.leadership import StandbyError
from tests.controller.conftest import DatabasePlace
from tests.controller.processes import DEADLINE_S, eventually


@pytest.fixture
def make_lock(database: DatabasePlace) -> Iterator[Callable[..., LeaderLock]]:
    made: list[LeaderLock] = []

    def make(holder: str = "a", failover_s: float = 5.0) -> LeaderLock:
        url = f"http://{holder}:9500"
        made.append(LeaderLock(database.database, holder=holder, url=url, failover_s=failover_s))
        made[-1].connect()
        return made[-1]

    yield make
    for lock in made:
        lock.close()


def test_one_wins_and_the_others_learn_who(make_lock: Callable[..., LeaderLock]) -> None:
    first, second = make_lock("a"), make_lock("b")
    won = first.try_win(None)
    assert (won.won, won.term) == (True, 1)
    told = second.try_win(None)
    assert (told.won, told.term, told.holder, told.url) == (False, 1, "a", "http://a:9500")
    first.close()
    eventually(lambda: second.try_win(None).won, "the second one's lead")
    assert make_lock("c").try_win(None).term == 2


def test_who_led_last_goes_on_with_its_term_unless_another_led_in_between(make_lock: Callable[..., LeaderLock]) -> None:
    first = make_lock("a")
    term = first.try_win(None).term
    first.close()
    again = make_lock("a")
    eventually(lambda: again.try_win(term).won, "its lead again")
    assert again.try_win(term).term == term
    again.close()
    other = make_lock("b")
    eventually(lambda: other.try_win(None).won, "another's lead")
    other.close()
    back = make_lock("a")
    eventually(lambda: back.try_win(term).won, "its lead once more")
    assert back.try_win(None).term > term + 1


def test_silence_costs_the_lead_by_the_servers_clock(make_lock: Callable[..., LeaderLock]) -> None:
    silent, other = make_lock("a", failover_s=0.3), make_lock("b")
    assert silent.try_win(None).won
    eventually(lambda: other.try_win(None).won, "the other's lead")
    with pytest.raises(StoreError):
        silent.ping()


def test_pings_keep_the_lead_and_prove_the_very_session(make_lock: Callable[..., LeaderLock]) -> None:
    leader, other = make_lock("a", failover_s=0.5), make_lock("b")
    assert leader.try_win(None).won
    for _ in range(15):
        leader.ping()
        assert not other.try_win(None).won
        time.sleep(0.1)
    assert leader._connection is not None
    leader._connection.invalidate()
    with pytest.raises(StoreError):
        leader.ping()


def test_a_leader_that_stops_within_a_transaction_is_not_waited_for(
    database: DatabasePlace, make_lock: Callable[..., LeaderLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_postgres, "IDLE_S", 0.2)
    zombie = PostgresStore(Database(parse_database_url(database.url)), term=0)

    def stop_in_the_middle() -> None:
        with zombie._fenced(1) as connection:
            assert connection is not None
            assert make_lock("b").try_win(None).term == 1
            connection.exec_driver_sql("INSERT INTO meta VALUES ('late', '')")

    with pytest.raises(StoreError):
        stop_in_the_middle()
    with pytest.raises(FencedError):
        zombie.write(Batch(number=2, target=2, state={"meta": {"late": ""}}))
    zombie.close()
    assert database.reader().meta() == {}


class Notes:
    """A seat that notes down what happens to it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def take_over(self, term: int) -> None:
        self.seen.append(f"take over {term}")

    def resume(self) -> None:
        self.seen.append("resume")

    def suspend(self) -> None:
        self.seen.append("suspend")

    def step_down(self) -> None:
        self.seen.append("step down")


async def true_soon(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        await asyncio.sleep(0.01)


def contender(database: DatabasePlace, holder: str, failover_s: float = 1.0) -> Contender:
    def make_lock() -> LeaderLock:
        return LeaderLock(database.database, holder=holder, url=f"http://{holder}:9500", failover_s=failover_s)

    return Contender(make_lock, failover_s=failover_s)


def end_sessions(database: DatabasePlace) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'wadiloco controller'"
        )


def test_a_lead_that_is_lost_for_a_moment_goes_on_with_the_same_state(database: DatabasePlace) -> None:
    one, seat = contender(database, "a"), Notes()

    async def run() -> None:
        exit_event = asyncio.Event()
        running = asyncio.create_task(one.run(exit_event, seat))
        await true_soon(lambda: one.leads, "the lead")
        end_sessions(database)
        with pytest.raises(StandbyError, match="in doubt"):
            await one.confirm()
        assert not one.leads
        await true_soon(lambda: one.leads, "the lead again")
        await one.confirm()
        exit_event.set()
        await running
        one.close()

    asyncio.run(run())
    assert seat.seen == ["take over 1", "suspend", "resume"]
    assert one.term == 1


def test_a_lead_that_another_took_ends_the_state(database: DatabasePlace) -> None:
    one, other = contender(database, "a"), contender(database, "b")
    seat, other_seat = Notes(), Notes()

    async def run() -> None:
        exit_event = asyncio.Event()
        tasks = [asyncio.create_task(one.run(exit_event, seat))]
        await true_soon(lambda: one.leads, "the first lead")
        tasks.append(asyncio.create_task(other.run(exit_event, other_seat)))
        await true_soon(lambda: other.refusal.leader_url is not None, "the name of the leader")
        assert other.refusal.leader_url == "http://a:9500"
        assert not other.leads
        with pytest.raises(StandbyError, match="leader is http://a:9500"):
            await other.confirm()
        # Whoever is quicker after the sessions end: at some point it is the other one.
        while not other.leads:
            end_sessions(database)
            await asyncio.sleep(0.3)
        await true_soon(lambda: "step down" in seat.seen, "the end of the first one's state")
        assert not one.leads
        assert one.refusal.leader_url == "http://b:9500"
        exit_event.set()
        await asyncio.gather(*tasks)
        one.close()
        other.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert other.term is not None
    assert other.term >= 2
