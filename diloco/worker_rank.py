"""What the parts of the first rank's worker share; they are `diloco.worker_steps`, `worker_syncs` and so on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from diloco.inbox import Inbox, TransferThread
from diloco.protocol import Event, WorkerConfig
from diloco.shards import Shards
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.team import Action, Team
from diloco.vault.guard import Guard

T = TypeVar("T")

STOP_POLL_S = 0.2
ABANDON_S = 2.0
"""Time that a transfer has to notice the order to stop."""


class Transfers:
    """Calls on the transfer thread, and how the inner loop waits for one while the other ranks hold."""

    def __init__(self, thread: TransferThread, *, inbox: Inbox, team: Team) -> None:
        self._thread = thread
        self._inbox = inbox
        self._team = team

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Let it run beside the inner steps."""
        return self._thread.submit(call)

    def call(self, call: Callable[[], T]) -> T | None:
        """The result of a call; None when it does not end in time after the order to stop."""
        future = self._thread.submit(call)
        while not self._inbox.stop.is_set():
            if wait([future], timeout=STOP_POLL_S).done:
                return future.result()
            self._team.tell(Action.HOLD)
        return future.result() if wait([future], timeout=ABANDON_S).done else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The first rank of an island, as each part of its worker knows it."""

    config: WorkerConfig
    island: StreamingIsland
    exchange: StreamingExchange
    shards: Shards
    team: Team
    guard: Guard
    inbox: Inbox
    transfers: Transfers
    emit: Callable[[Event], None]
