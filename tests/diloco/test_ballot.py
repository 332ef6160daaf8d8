"""Ranks that vote on the end of a step, in one process: what they cast is counted when all have cast."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from diloco.ballot import CAST_EVERY_S, Ballot
from diloco.safepoint import YieldInterrupted

JOIN_S = 20.0


class Count:
    """One vote of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._cast: list[Tensor] = []
        self._num_ranks = num_ranks
        self._all_in = threading.Condition()

    def add(self, vote: Tensor) -> None:
        with self._all_in:
            self._cast.append(vote)
            if self.is_done:
                least = torch.stack(self._cast).amin(dim=0)
                for each in self._cast:
                    each.copy_(least)
                self._all_in.notify_all()

    @property
    def is_done(self) -> bool:
        return len(self._cast) == self._num_ranks

    def wait(self) -> None:
        with self._all_in:
            assert self._all_in.wait_for(lambda: self.is_done, JOIN_S)


class Votes:
    """The minima of some ranks, matched by their order on each."""

    def __init__(self, num_ranks: int) -> None:
        self.now_s = 0.0
        self.counts: list[Count] = []
        self._num_ranks = num_ranks
        self._cast = [0] * num_ranks
        self._lock = threading.Lock()

    def ballot(self, rank: int) -> Ballot:
        def start(vote: Tensor) -> Count:
            with self._lock:
                number = self._cast[rank]
                self._cast[rank] += 1
                while len(self.counts) <= number:
                    self.counts.append(Count(self._num_ranks))
            self.counts[number].add(vote)
            return self.counts[number]

        ballot = Ballot(start, clock=lambda: self.now_s)
        ballot.open()
        return ballot

    def wait_long(self) -> None:
        self.now_s += 2 * CAST_EVERY_S


class Background(threading.Thread):
    """A rank that says it is ready; ``interrupted`` tells how that ended."""

    def __init__(self, ballot: Ballot) -> None:
        super().__init__(daemon=True)
        self._ballot = ballot
        self.interrupted: bool | None = None
        self.start()

    def run(self) -> None:
        try:
            self._ballot.be_ready()
        except YieldInterrupted:
            self.interrupted = True
        else:
            self.interrupted = False

    def ended(self) -> bool:
        self.join(JOIN_S)
        assert self.interrupted is not None
        return self.interrupted


def test_ranks_that_never_wait_vote_once() -> None:
    votes = Votes(2)
    first, second = Background(votes.ballot(0)), Background(votes.ballot(1))
    assert not first.ended()
    assert not second.ended()
    assert len(votes.counts) == 1


def test_a_rank_that_is_ready_waits_for_one_at_the_gate_which_never_blocks() -> None:
    votes = Votes(2)
    waiting = votes.ballot(1)
    ready = Background(votes.ballot(0))
    for _ in range(3):
        waiting.wait_on()
        votes.wait_long()
    assert ready.interrupted is None
    assert not Background(waiting).ended()
    assert not ready.ended()
    assert len(votes.counts) >= 2


def test_a_short_wait_costs_no_vote() -> None:
    votes = Votes(2)
    ballot = votes.ballot(0)
    for _ in range(100):
        ballot.wait_on()
    assert not votes.counts


def test_an_order_gives_the_step_up_on_all_ranks() -> None:
    votes = Votes(3)
    leader, waiting = votes.ballot(0), votes.ballot(1)
    ready = Background(votes.ballot(2))
    votes.wait_long()
    waiting.wait_on()
    giving_up = threading.Thread(target=leader.abandon, daemon=True)
    giving_up.start()
    assert ready.ended()
    giving_up.join(JOIN_S)
    with pytest.raises(YieldInterrupted):
        waiting.wait_on()
    for ballot in (leader, waiting):
        ballot.open()


def test_a_ready_leader_with_an_order_gives_up_what_others_wait_for() -> None:
    votes = Votes(2)
    leader, waiting = votes.ballot(0), votes.ballot(1)
    votes.wait_long()
    waiting.wait_on()

    def wait_on() -> None:
        while True:
            votes.wait_long()
            try:
                waiting.wait_on()
            except YieldInterrupted:
                return

    thread = threading.Thread(target=wait_on, daemon=True)
    thread.start()
    with pytest.raises(YieldInterrupted):
        leader.be_ready(lambda: True)
    thread.join(JOIN_S)
    assert not thread.is_alive()


def test_a_ready_leader_with_an_order_ends_a_step_that_nobody_waits_in() -> None:
    votes = Votes(2)
    leader = votes.ballot(0)
    other = Background(votes.ballot(1))
    leader.be_ready(lambda: True)
    assert not other.ended()


def test_outside_of_a_step_nobody_votes() -> None:
    votes = Votes(1)
    ballot = votes.ballot(0)
    ballot.be_ready()
    votes.wait_long()
    ballot.wait_on()
    ballot.abandon()
    assert len(votes.counts) == 1
