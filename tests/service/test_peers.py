"""Who asks stays with the peer that answers, and leaves one that does not, once."""

from __future__ import annotations

import pytest

from service.peers import Peers, split_urls


def test_it_goes_round() -> None:
    peers = Peers(["a", "b", "c"])
    seen = []
    for _ in range(4):
        seen.append(peers.current)
        peers.leave(peers.current)
    assert seen == ["a", "b", "c", "a"]


def test_many_that_leave_the_same_one_go_to_the_same_next() -> None:
    peers = Peers(["a", "b", "c"])
    asked = peers.current
    for _ in range(3):
        peers.leave(asked)
    assert peers.current == "b"


def test_who_waits_on_the_peer_that_is_left_is_told_and_who_waits_on_the_next_is_not() -> None:
    peers = Peers(["a", "b"])
    first = peers.moved
    peers.leave("a")
    assert first.is_set()
    assert not peers.moved.is_set()


def test_the_only_one_is_never_left() -> None:
    peers = Peers(["a"])
    peers.leave("a")
    assert (peers.current, peers.moved.is_set()) == ("a", False)


@pytest.mark.parametrize(("text", "urls"), [("", ()), ("a", ("a",)), ("a, b,", ("a", "b"))])
def test_a_list_with_commas_is_several_urls(text: str, urls: tuple[str, ...]) -> None:
    assert split_urls(text) == urls
