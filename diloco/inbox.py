"""Threads of a rank worker beside its inner loop: one reads the agent's commands, one runs the transfers of a sync.

Both start before the main thread becomes ``SCHED_IDLE``, and so keep their priority.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TextIO, TypeVar

from pydantic import ValidationError

from diloco.protocol import COMMANDS, PauseCommand, ResumeCommand, StopCommand, SyncCommand, VaultCommand
from diloco.scheduling import become_idle

logger = logging.getLogger(__name__)

T = TypeVar("T")

ORPHAN_GRACE_S = 5.0
"""Time that the inner loop has to end after its agent is gone."""
ORPHAN_EXIT_CODE = 3
ANY_STEP = 1 << 62
"""Of a loop that nobody tells at which step to sync."""


class Inbox:
    """The agent's newest orders."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._changed = threading.Condition()
        self._paused = False
        self._wants_snapshot = False
        self._sync: SyncCommand | None = None
        self._planned: deque[SyncCommand] = deque()
        """Syncs that are for a step of their own, in their order."""
        self._vault: VaultCommand | None = None
        self._on_stop: Callable[[], None] | None = None

    def listen(self, lines: TextIO) -> None:
        """Read commands on a thread of their own. When they end, the process does, whatever it is doing."""
        threading.Thread(target=self._read, args=(lines,), name="commands", daemon=True).start()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call this, from the reading thread, when the order to stop comes."""
        self._on_stop = callback
        if self.stop.is_set():
            callback()

    def request_stop(self) -> None:
        self.stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._on_stop is not None:
            self._on_stop()

    @property
    def paused(self) -> bool:
        return self._paused

    def has_order(self, now_s: float, *, step: int = ANY_STEP) -> bool:
        """Whether there is something else to do than inner steps."""
        with self._changed:
            return self._paused or self.stop.is_set() or self._due(now_s, step) is not None

    def take_due(self, now_s: float, *, step: int = ANY_STEP) -> SyncCommand | None:
        """The ordered sync, once, from its ``not_before_s`` and its ``at_step`` on."""
        with self._changed:
            sync = self._due(now_s, step)
            if sync is not None and sync is self._sync:
                self._sync = None
            elif sync is not None:
                self._planned.popleft()
            return sync

    def _due(self, now_s: float, step: int) -> SyncCommand | None:
        first = self._planned[0] if self._planned else None
        return next((sync for sync in (self._sync, first) if _is_due(sync, now_s, step)), None)

    @property
    def has_vault(self) -> bool:
        return self._vault is not None

    def take_vault(self) -> VaultCommand | None:
        """What the agent said about the vault, once."""
        with self._changed:
            command, self._vault = self._vault, None
            return command

    def wants_snapshot(self) -> bool:
        """Whether the order to pause that holds now wants one; says so once."""
        with self._changed:
            wanted, self._wants_snapshot = self._wants_snapshot, False
            return wanted

    def wait(self, timeout_s: float) -> None:
        """Until something changes, at most ``timeout_s``."""
        with self._changed:
            if not self.stop.is_set():
                self._changed.wait(timeout_s)

    def handle(self, line: str) -> None:
        """Take in one command; a line that is none is logged and dropped."""
        try:
            command = COMMANDS.validate_json(line)
        except ValidationError as exc:
            logger.warning("dropped a line that is no command error=%s", exc.errors()[0]["msg"])
            return
        match command:
            case SyncCommand():
                with self._changed:
                    if command.at_step is None:
                        self._sync = command
                    else:
                        self._planned.append(command)
                    self._changed.notify_all()
            case PauseCommand() | ResumeCommand():
                with self._changed:
                    self._paused = isinstance(command, PauseCommand)
                    self._wants_snapshot = isinstance(command, PauseCommand) and command.snapshot
                    self._changed.notify_all()
            case VaultCommand():
                with self._changed:
                    self._vault = command
                    self._changed.notify_all()
            case StopCommand():
                self.request_stop()

    def _read(self, lines: TextIO) -> None:
        for line in lines:
            self.handle(line)
        if self.stop.is_set():
            return
        logger.warning("the agent is gone, stopping")
        self.request_stop()
        threading.Event().wait(ORPHAN_GRACE_S)
        # Nobody is left to kill an inner loop that hangs, and it may be starved of its core.
        os._exit(ORPHAN_EXIT_CODE)


def _is_due(sync: SyncCommand | None, now_s: float, step: int) -> bool:
    return (
        sync is not None
        and (sync.not_before_s is None or now_s >= sync.not_before_s)
        and (sync.at_step is None or step >= sync.at_step)
    )


class TransferThread:
    """Runs calls one after another on a daemon thread."""

    def __init__(self, *, idle: bool) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, args=(idle,), name="transfers", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as exc:  # noqa: BLE001 (belongs to whoever waits for the result)
                future.set_exception(exc)

        self._calls.put(run)
        return future

    def _run(self, idle: bool) -> None:
        if idle:
            become_idle()
        while True:
            self._calls.get()()
