"""How a worker waits for the run, without a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from diloco.group import PeerLostError
from diloco.inbox import Inbox
from diloco.streaming import holds_nothing
from diloco.worker_joining import join_run
from diloco.worker_rank import Rank
from service.errors import UnavailableError


def test_a_worker_waits_on_for_the_synchronizer_but_not_for_ranks_that_are_gone() -> None:
    inbox = Inbox()
    errors: list[UnavailableError] = [UnavailableError("not there yet"), PeerLostError("gone")]

    def call(_: Callable[[], None]) -> None:
        if not errors:
            inbox.request_stop()
            return
        raise errors.pop(0)

    rank = cast(Rank, SimpleNamespace(inbox=inbox, transfers=SimpleNamespace(call=call)))
    with pytest.raises(PeerLostError):
        join_run(rank, holds=holds_nothing)
