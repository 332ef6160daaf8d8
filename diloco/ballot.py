"""How the ranks of an island agree on the end of a step that the gate may hold up on any of them, at any layer.

Nobody waits for the gate inside a collective: a rank that is done would sit in the sum of the gradients for as long as
the server has work, and run into the timeout. Before the sum the ranks vote, and add up only when all are ready:

    all READY        → the gradients are added up
    some WAITING     → vote again
    one ABANDON      → all give the step up and take its batch again: rank 0 has an order

A rank at the gate casts WAITING now and then, without waiting for the others: when the gate opens it computes on at
once, and its vote is counted when they have cast theirs. So each vote ends within the longest step, not the longest
wait. The votes of a step are the minimum over the ranks, one collective each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from diloco.safepoint import YieldInterrupted

CAST_EVERY_S = 0.25
"""An order to ranks that wait for the gate reaches them within about twice this time."""


class Vote(IntEnum):
    """Ordered: the least of all ranks' votes is the result."""

    ABANDON = 0
    WAITING = 1
    READY = 2


class Counting(Protocol):
    """A vote that is being counted."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class Ballot:
    """The votes of one rank; all ranks call `open` at each step."""

    def __init__(self, start_minimum: Callable[[Tensor], Counting], *, clock: Callable[[], float] = time.monotonic):
        """``start_minimum`` begins to take the least of a tensor over all ranks, in place."""
        self._start_minimum = start_minimum
        self._clock = clock
        self._vote = torch.zeros(1, dtype=torch.int64)
        self._counting: Counting | None = None
        self._is_open = False
        self._due_s = 0.0

    def open(self) -> None:
        """A step begins."""
        assert not self._is_open, "the last step has not ended"
        self._is_open = True
        self._due_s = self._clock() + CAST_EVERY_S

    def wait_on(self) -> None:
        """Say that this rank waits for the gate; returns at once.

        Raises:
            YieldInterrupted: the step is given up.
        """
        if not self._is_open:
            return
        if self._counting is not None:
            if not self._counting.is_done:
                return
            self._result()
        if self._clock() >= self._due_s:
            self._cast(Vote.WAITING)

    def be_ready(self, has_order: Callable[[], bool] = lambda: False) -> None:
        """Return when all ranks are ready; ``has_order`` gives the step up instead, while others wait.

        Raises:
            YieldInterrupted: the step is given up.
        """
        assert self._is_open, "no step has begun"
        self._settle()
        while self._is_open:
            self._cast(Vote.READY)
            if self._result() is Vote.WAITING and has_order():
                self.abandon()
                raise YieldInterrupted

    def abandon(self) -> None:
        """Give the step up on all ranks, unless it has ended."""
        if not self._is_open:
            return
        try:
            self._settle()
            self._cast(Vote.ABANDON)
            self._result()
        except YieldInterrupted:
            pass

    def _settle(self) -> None:
        """Count the vote that was cast while this rank waited."""
        if self._counting is not None:
            self._result()

    def _cast(self, vote: Vote) -> None:
        assert self._counting is None, "one vote at a time"
        self._vote.fill_(int(vote))
        self._counting = self._start_minimum(self._vote)

    def _result(self) -> Vote:
        assert self._counting is not None
        counting, self._counting = self._counting, None
        counting.wait()
        self._due_s = self._clock() + CAST_EVERY_S
        result = Vote(int(self._vote))
        if result is not Vote.WAITING:
            self._is_open = False
        if result is Vote.ABANDON:
            raise YieldInterrupted
        return result
