"""The one that leads is found and asked, and the token goes nowhere else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from service.errors import UnavailableError, WadilocoError
from service.leader import ask_leader, may_follow
from service.settings import PeerSettings

DEAD = "http://127.0.0.1:1"


@dataclass
class Peer:
    """One process: it leads, or it stands by and names another."""

    url: str = ""
    leads: bool = False
    leader: str | None = None
    status: int = 200
    tokens: list[str | None] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def answer(self) -> tuple[int, dict[str, str], dict[str, str]]:
        if self.leads:
            return self.status, {}, {"error": "ConflictError", "message": "done", "field": "action"}
        headers = {} if self.leader is None else {"Leader-URL": self.leader}
        return 503, headers, {"error": "StandbyError", "message": f"standby, leader is {self.leader}"}


@contextmanager
def served(peer: Peer) -> Iterator[Peer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            peer.tokens.append(self.headers.get("Authorization"))
            peer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, body = peer.answer()
            text = json.dumps(body).encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(text))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        peer.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield peer
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def leader() -> Iterator[Peer]:
    with served(Peer(leads=True)) as peer:
        yield peer


@pytest.fixture
def standby(leader: Peer) -> Iterator[Peer]:
    with served(Peer(leader=leader.url)) as peer:
        yield peer


def ask(*urls: str, token: str | None = None) -> tuple[int, str]:
    settings = PeerSettings(token=None if token is None else SecretStr(token))
    with ask_leader(settings, urls, "POST", "/x", timeout_s=20, field="controller", json={"a": 1}) as response:
        response.read()
        return response.status_code, response.json()["message"]


def test_the_one_that_leads_is_asked_wherever_it_stands(leader: Peer, standby: Peer) -> None:
    for urls in ((leader.url,), (standby.url, leader.url), (DEAD, leader.url), (DEAD, standby.url, leader.url)):
        assert ask(*urls, token="secret") == (200, "done")  # noqa: S106
    assert leader.bodies == [b'{"a":1}'] * 4
    assert leader.tokens == ["Bearer secret"] * 4


def test_what_a_leader_refuses_is_its_answer(leader: Peer) -> None:
    leader.status = 409
    assert ask(leader.url, DEAD) == (409, "done")


def test_a_leader_that_only_the_standby_names_is_followed_on_a_host_that_was_given(leader: Peer, standby: Peer) -> None:
    assert ask(standby.url, token="secret") == (200, "done")  # noqa: S106
    assert leader.tokens == ["Bearer secret"]


def test_a_token_is_not_sent_to_a_host_that_nobody_gave(leader: Peer, standby: Peer) -> None:
    standby.leader = leader.url.replace("127.0.0.1", "localhost")
    with pytest.raises(UnavailableError) as caught:
        ask(standby.url, token="secret")  # noqa: S106
    assert caught.value.remedy == f"give {standby.leader} too, if the token may be sent there"
    assert leader.tokens == []
    assert ask(standby.url) == (200, "done")
    assert leader.tokens == [None]


@pytest.mark.parametrize(
    ("given", "leader", "allowed"),
    [
        ("https://a:1", "https://a:2", True),
        ("http://a:1", "https://a:2", True),
        ("https://a:1", "http://a:1", False),
        ("https://a:1", "https://a.b:1", False),
        ("https://a:1", "https://x@a:1", True),
        ("https://a:1", "https://a:1@b:1", False),
    ],
)
def test_a_token_goes_to_the_same_host_and_not_in_the_open(given: str, leader: str, *, allowed: bool) -> None:
    assert may_follow(PeerSettings(token=SecretStr("x")), [given], leader) is allowed
    assert may_follow(PeerSettings(), [given], leader)


def test_only_one_hop_is_followed(leader: Peer, standby: Peer) -> None:
    with served(Peer(leader=standby.url)) as first:
        with pytest.raises(WadilocoError, match="standby, leader is"):
            ask(first.url)
        assert leader.tokens == []
        standby.leader = first.url
        with pytest.raises(WadilocoError, match="standby"):
            ask(first.url)


@pytest.mark.parametrize("leader_url", ["http://a..b", "ftp://a", "", "nonsense"])
def test_a_leader_that_is_no_url_is_not_followed(standby: Peer, leader_url: str) -> None:
    standby.leader = leader_url
    with pytest.raises(UnavailableError, match="standby"):
        ask(standby.url)


def test_nobody_there_is_told_by_the_option() -> None:
    with pytest.raises(UnavailableError, match=f"no answer from {DEAD}") as caught:
        ask(DEAD)
    assert caught.value.field == "controller"
