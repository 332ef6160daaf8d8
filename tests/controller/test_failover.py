"""Several controllers as real processes on one PostgreSQL: killed, stopped, continued, and without their database."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from controller.schema import Heartbeat
from replay.processes import free_ports
from service.peers import Peers
from tests.controller.conftest import DatabasePlace
from tests.controller.helpers import progress, registration, report, sample
from tests.controller.postgres import Server
from tests.controller.processes import DEADLINE_S, FIXED_H, Process, controller, eventually
from tests.ports import share_of

pytestmark = pytest.mark.integration

FAILOVER = ("--failover-s", "1", "--budget-syncs", "100000")
PERIOD_S = 0.02


class Stream:
    """One sidecar and one island of a fleet: what was acknowledged to them, whichever controller it was."""

    def __init__(self, urls: list[str]) -> None:
        self._peers = Peers(urls)
        self._http = httpx.Client(timeout=3, trust_env=False)
        self._stop = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._epoch = 0
        self._seq = 0
        self._step = 0
        self._h = 0
        self._pending: list[Any] = []
        self.failure: Exception | None = None
        self._round = 0
        self.samples: list[float] = []
        self.answered_by: list[str] = []
        self.longest_gap_s = 0.0
        """Between two answers."""
        self._thread.start()

    @property
    def round(self) -> int:
        """Outer steps that it took; each was acknowledged, but for those in ``_pending``. Raises what ended it."""
        if self.failure is not None:
            raise self.failure
        return self._round

    def settle(self) -> None:
        """End, once all that it did is acknowledged."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "a sync was not acknowledged"
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End, whatever is acknowledged."""
        self._closed = True
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._http.close()

    def _run(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._stop.wait(PERIOD_S) or (self._pending and not self._closed):
                if self._live():
                    now_s = time.monotonic()
                    self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
        except Exception as exc:  # noqa: BLE001 - raised by the test
            self.failure = exc

    def _live(self) -> bool:
        """One second of a fleet, so to say; whether all of it was answered."""
        if not self._epoch and not self._register():
            return False
        t_s = time.time()
        answer = self._ask("POST", "/v1/samples", json={"samples": [sample(t_s=t_s)]})
        if answer is None:
            return False
        if answer.json()["accepted"]:
            self.samples.append(t_s)
        return self._beat() and (self._stop.is_set() or self._obey())

    def _register(self) -> bool:
        answer = self._ask("POST", "/v1/agents", json=registration().model_dump(mode="json"))
        if answer is not None:
            self._epoch = answer.json()["epoch"]
            self._seq = max(self._seq, answer.json()["directive_seq"])
        return answer is not None

    def _beat(self) -> bool:
        self._step, self._h = self._step + 10, self._h + 10
        told = progress(self._h, step=self._step, round=self._round)
        beat = Heartbeat(instance="first", epoch=self._epoch, t_s=time.time(), progress=told, syncs=self._pending)
        answer = self._ask("POST", "/v1/agents/island-0/heartbeat", json=beat.model_dump(mode="json"))
        if answer is not None:
            del self._pending[: answer.json()["syncs_acknowledged"]]
        return answer is not None

    def _obey(self) -> bool:
        query = {"instance": "first", "after": self._seq, "wait_s": 0}
        answer = self._ask("GET", "/v1/agents/island-0/directives", params=query)
        for directive in answer.json()["directives"] if answer is not None else ():
            self._seq = directive["seq"]
            if directive["kind"] == "sync" and directive["round"] == self._round:
                now_s = time.time()
                self._pending.append(report(self._round, started_s=now_s, pushed_s=None, finished_s=now_s + 0.001))
                self._round, self._h = self._round + 1, 0
        return answer is not None

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response | None:
        url = self._peers.current
        try:
            answer = self._http.request(method, f"{url}{path}", **arguments)
        except httpx.HTTPError:
            self._peers.leave(url)
            return None
        if answer.status_code == 503:
            self._peers.leave(url)
            return None
        assert answer.status_code == 200, answer.text
        if not self.answered_by or self.answered_by[-1] != url:
            self.answered_by.append(url)
        return answer


class Pair:
    """Two controllers on one database, the first of which leads, and a fleet that knows both."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        ports = free_ports(2, share_of(range(18800, 18900)))
        started = []
        # Their policies tell whose a decision is.
        for port, policy in zip(ports, (FIXED_H, ("--policy", "pressure_gate")), strict=True):
            named = ("--advertise-url", f"http://127.0.0.1:{port}")
            started.append(stack.enter_context(controller(url, *FAILOVER, *named, port=port, policy=policy)))
            if len(started) == 1:
                eventually(lambda: leads(started[0]), "the first lead")
        self.first, self.second = started
        self.stream = Stream([one.url for one in started])
        stack.callback(self.stream.close)


def leads(process: Process) -> bool:
    return process.http.get("/readyz").status_code == 200


@pytest.fixture
def pair(database: DatabasePlace) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, database.url)


def check_that_nothing_is_lost(database: DatabasePlace, stream: Stream, leader: Process) -> None:
    """After the stream has ended."""
    reader = database.reader()
    kept = {one.t_s for one in reader.samples()}
    assert [t_s for t_s in stream.samples if t_s not in kept] == []
    rounds = leader.http.get("/v1/rounds").json()["rounds"]
    applied = [one["round"] for one in rounds if one["slots_applied"]]
    assert applied == list(range(stream.round))[-len(applied) :]
    assert leader.http.get("/v1/budget").json()["spent"] == stream.round
    ids = [one.id for one in reader.decisions(since=0, limit=100_000)]
    assert ids == sorted(set(ids))
    directed = {one["decision_id"] for one in rounds if one["decision_id"] is not None}
    assert directed <= set(ids)


def test_a_standby_says_so_and_names_the_leader(pair: Pair) -> None:
    standby = pair.second.http
    eventually(lambda: pair.first.url in standby.get("/readyz").json()["reason"], "the leader's name")
    ready = standby.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["reason"].startswith(f"standby, leader is {pair.first.url}")
    assert standby.get("/healthz").status_code == 200
    for refused in (
        standby.post("/v1/samples", json={"samples": []}),
        standby.get("/v1/agents/island-0/directives", params={"instance": "first"}),
        standby.put("/v1/policy", json={"name": "no_sync"}),
        standby.get("/v1/fleet"),
    ):
        assert (refused.status_code, refused.json()["error"]) == (503, "StandbyError")
        assert refused.headers["Retry-After"] == "1"
        assert refused.headers["Leader-URL"] == pair.first.url
    metrics = standby.get("/metrics").text
    assert "wadiloco_controller_leading 0.0" in metrics
    assert "wadiloco_controller_scrape_failures_total 0.0" in metrics
    assert "wadiloco_controller_leading 1.0" in pair.first.http.get("/metrics").text


def test_a_kill_of_the_leader_loses_nothing_and_the_other_goes_on(pair: Pair, database: DatabasePlace) -> None:
    stream = pair.stream
    eventually(lambda: stream.round >= 5, "rounds of the first leader")
    pair.first.child.send_signal(signal.SIGKILL)
    eventually(lambda: leads(pair.second), "the second's lead")
    before = stream.round
    pair.second.http.put("/v1/policy", json={"name": "fixed_h", "params": {"h": 10}}).raise_for_status()
    eventually(lambda: stream.round >= before + 5, "rounds of the second leader")
    stream.settle()
    assert stream.answered_by[-1] == pair.second.url
    check_that_nothing_is_lost(database, stream, pair.second)


def test_a_leader_that_was_stopped_notices_and_writes_nothing_more(pair: Pair, database: DatabasePlace) -> None:
    stream = pair.stream
    eventually(lambda: stream.round >= 3, "rounds of the first leader")
    pair.first.child.send_signal(signal.SIGSTOP)
    eventually(lambda: leads(pair.second), "the second's lead")
    eventually(lambda: stream.answered_by[-1] == pair.second.url, "answers of the second")
    taken = len(stream.samples)
    pair.first.child.send_signal(signal.SIGCONT)
    # Its very first answer refuses: it need not have asked the database before.
    stale = pair.first.http.post("/v1/samples", json={"samples": [sample("stale", time.time())]})
    assert stale.status_code == 503
    eventually(lambda: pair.second.url in pair.first.http.get("/readyz").json()["reason"], "the new leader's name")
    eventually(lambda: len(stream.samples) > taken + 20, "more samples")
    stream.settle()
    assert pair.first.http.get("/healthz").status_code == 200
    assert "wadiloco_controller_leading 0.0" in pair.first.http.get("/metrics").text
    policies = [one.policy for one in database.reader().decisions(since=0, limit=100_000)]
    changed = policies.index("pressure_gate")
    assert set(policies[:changed]) == {"fixed_h"}
    assert set(policies[changed:]) == {"pressure_gate"}
    assert "stale" not in {one.server_id for one in database.reader().samples()}
    check_that_nothing_is_lost(database, stream, pair.second)


def test_a_clean_stop_of_the_leader_hands_over_at_once(pair: Pair, database: DatabasePlace) -> None:
    eventually(lambda: pair.stream.round >= 2, "rounds of the first leader")
    pair.first.child.send_signal(signal.SIGTERM)
    assert pair.first.child.wait(DEADLINE_S) == 0
    eventually(lambda: leads(pair.second), "the second's lead")
    eventually(lambda: pair.stream.answered_by[-1] == pair.second.url, "answers of the second")
    pair.stream.settle()
    check_that_nothing_is_lost(database, pair.stream, pair.second)


def live_without_database(server: Server, database: DatabasePlace, stream: Stream, one: Process, away_s: float) -> None:
    eventually(lambda: stream.round >= 3, "rounds")
    server.kill()
    eventually(lambda: one.http.get("/readyz").status_code == 503, "not ready")
    assert one.http.get("/healthz").status_code == 200
    refused = one.http.put("/v1/policy", json={"name": "no_sync"})
    assert (refused.status_code, "in doubt" in refused.json()["message"]) == (503, True)
    assert one.http.get("/v1/fleet").status_code == 200
    reason = one.http.get("/readyz").json()["reason"]
    assert "postgresql://runner@127.0.0.1" in reason
    assert "connection" in reason
    time.sleep(away_s)
    server.start()
    before = stream.round
    eventually(lambda: leads(one), "the lead again")
    eventually(lambda: stream.round >= before + 3, "rounds again")
    stream.settle()
    check_that_nothing_is_lost(database, stream, one)


def test_a_database_that_is_away_is_named_and_costs_nothing_that_was_acknowledged(
    postgres_server: Server, database: DatabasePlace
) -> None:
    with controller(database.url, *FAILOVER) as one:
        eventually(lambda: leads(one), "the lead")
        with closing(Stream([one.url])) as stream:
            live_without_database(postgres_server, database, stream, one, away_s=1.0)


def test_a_database_that_hangs_hangs_no_answer(postgres_server: Server, database: DatabasePlace) -> None:
    with controller(database.url, *FAILOVER) as one:
        eventually(lambda: leads(one), "the lead")
        stream = Stream([one.url])
        try:
            eventually(lambda: stream.round >= 2, "rounds")
            postgres_server.freeze()
            eventually(lambda: not leads(one), "not ready")
            assert one.http.post("/v1/samples", json={"samples": []}).status_code == 503
            assert one.http.get("/v1/fleet").status_code == 200
            postgres_server.thaw()
            before = stream.round
            eventually(lambda: stream.round >= before + 2, "rounds again")
            stream.settle()
            check_that_nothing_is_lost(database, stream, one)
        finally:
            postgres_server.thaw()
            stream.close()


def test_a_wrong_database_ends_the_start_with_one_message(postgres_server: Server) -> None:
    url = postgres_server.url("nowhere", user="somebody", password="hush")  # noqa: S106
    command = [sys.executable, "-m", "wadiloco", "controller", "--port", "0", "--journal", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert "wadiloco controller: --journal: cannot use postgresql://somebody:***@127.0.0.1" in ended.stderr
    assert "hush" not in ended.stderr
    assert "Traceback" not in ended.stderr
