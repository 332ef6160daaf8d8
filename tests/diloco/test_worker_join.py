"""How a worker waits for the run, without a process of its own."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest

from diloco.group import PeerLostError
from diloco.inbox import Inbox
from diloco.worker import Worker
from service.errors import UnavailableError


def test_a_worker_waits_on_for_the_synchronizer_but_not_for_ranks_that_are_gone() -> None:
    inbox = Inbox()
    errors: list[UnavailableError] = [UnavailableError("not there yet"), PeerLostError("gone")]

    def wait_for(_: Future[None]) -> None:
        if not errors:
            inbox.request_stop()
            return
        raise errors.pop(0)

    transfers = SimpleNamespace(submit=lambda _: Future())
    worker = SimpleNamespace(_inbox=inbox, _transfers=transfers, _on_transfer_thread=wait_for, _join_once=None)
    with pytest.raises(PeerLostError):
        Worker._join(cast(Worker, worker))
