"""The syncs of a training loop of one's own, also those whose round is open while inner steps go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco.applied import Pulled
from diloco.errors import ManifestError
from diloco.protocol import SyncCommand
from diloco.resume import continues, restore_island
from diloco.schema import FragmentState, SyncReport
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.syncs import Pending, Tally
from service.errors import InputError, UnavailableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """A sync whose round is open while inner steps go on."""

    pending: Pending
    end: Future[Pulled]
    due_step: int | None
    """Step after which its result is applied; None: after the first by which it has come."""
    started_s: float
    blocked_s: float

    @property
    def fragment(self) -> int:
        return self.pending.tally.fragment

    def is_due(self, num_steps: int) -> bool:
        return self.end.done() if self.due_step is None else num_steps >= self.due_step


class LoopSyncs:
    """Runs the syncs of one island, at its step boundaries; one at a time."""

    def __init__(self, island: StreamingIsland, exchange: StreamingExchange, *, overlap_steps: int) -> None:
        """``overlap_steps``: after so many an overlapped result is applied; 0: after the first by which it has come."""
        self._island = island
        self._exchange = exchange
        self._overlap_steps = overlap_steps
        self.overlapped: Overlapped | None = None
        """The sync under way."""

    def join(self, *, deadline_s: float, num_fragments: int | None = None) -> None:
        """Become part of the run, see `StreamingExchange.join`.

        Raises:
            ManifestError: the run trains another model, or cuts it in another way.
            InputError: the model cannot be cut into so many fragments.
            UnavailableError: no synchronizer until the deadline.
        """
        try:
            self._exchange.join(deadline_s=deadline_s, num_fragments=num_fragments)
        except UnavailableError as exc:
            raise UnavailableError(
                exc.message,
                field="synchronizer",
                remedy="start it there (wadiloco synchronizer --directory DIR), or correct the URL",
            ) from exc
        except InputError as exc:
            if exc.field != "num_fragments":
                raise
            raise InputError(exc.message, field="fragments", remedy="give fewer, or a module of more tensors") from exc
        except ManifestError as exc:
            if exc.field == "num_fragments":
                raise ManifestError(
                    exc.message, field="fragments", remedy="leave it out to take the run's, or begin a new run"
                ) from exc
            raise ManifestError(
                exc.message,
                field="module",
                remedy="build the same module on every island, or start a synchronizer with a new --directory",
            ) from exc

    def begin(self, command: SyncCommand, *, num_steps: int) -> SyncReport | None:
        """Sync, or contribute if the command is to overlap; the report of a sync that ended with it."""
        started_s = time.time()
        done = self._exchange.begin(command) if command.overlap else self._exchange.run(command)
        if not isinstance(done, Pending):
            return None if done is None else done.model_copy(update={"started_s": started_s})
        due_step = num_steps + self._overlap_steps if self._overlap_steps else None
        self._await(done, due_step=due_step, started_s=started_s)
        return None

    def finish_due(self, num_steps: int) -> SyncReport | None:
        """The report of the sync under way, if it is time to apply its result."""
        assert self.overlapped is not None
        return self.finish() if self.overlapped.is_due(num_steps) else None

    def finish(self) -> SyncReport:
        """Apply the result of the sync under way; waits for it if it has not come."""
        sync, self.overlapped = self.overlapped, None
        assert sync is not None, "a sync is under way"
        resumed_s = time.time()
        report = self._exchange.finish(sync.pending, sync.end.result)
        finished_s = time.time()
        blocked_s = max(sync.blocked_s + finished_s - resumed_s, 0.0)
        return report.model_copy(update={"started_s": sync.started_s, "finished_s": finished_s, "blocked_s": blocked_s})

    def restore(
        self, states: Sequence[dict[str, Any]], run: Sequence[FragmentState], *, slot: int, deadline_s: float
    ) -> list[bool]:
        """Let each fragment go on from what `island_state` returned of it, or else from what is global now.

        The module is as it was when the states were taken. Says of each fragment whether it was the former, see
        `continues`.

        Raises:
            UnavailableError: the synchronizer does not answer until the deadline.
        """
        exact = []
        told: Sequence[FragmentState | None] = run or [None] * len(states)
        for exchange, island, state, now in zip(
            self._exchange.exchanges, self._island.fragments, states, told, strict=True
        ):
            exact.append(continues(state, now, slot=slot))
            if now is None or exact[-1]:
                exchange.forget_offer()
                restore_island(island, state)
            else:
                exchange.start_from(now.version, deadline_s=deadline_s)
        return exact

    def await_again(self, command: SyncCommand, *, fragment: int, due_step: int | None) -> None:
        """Wait on for the round that the accepted contribution of an earlier process is in."""
        island = self._island.fragments[fragment]
        accepted = island.accepted
        assert accepted is not None, "a sync under way has contributed"
        started_s, version = time.time(), island.version
        tally = Tally(started_s=started_s, round=version, fragment=fragment, num_fragments=self._island.num_fragments)
        tally.stands_for(accepted)
        pending = Pending(command=command, tally=tally, after_version=version)
        self._await(pending, due_step=due_step, started_s=started_s)

    def _await(self, pending: Pending, *, due_step: int | None, started_s: float) -> None:
        end = in_background(lambda: self._exchange.await_end(pending))
        self.overlapped = Overlapped(
            pending=pending, end=end, due_step=due_step, started_s=started_s, blocked_s=time.time() - started_s
        )


def in_background(call: Callable[[], T]) -> Future[T]:
    """The call on a thread of its own, which keeps no process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001 (belongs to whoever waits for the result)
            future.set_exception(exc)

    threading.Thread(target=run, name="sync", daemon=True).start()
    return future
