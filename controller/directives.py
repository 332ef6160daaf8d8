"""Directives waiting for their agents, and the long polls that wait for directives."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from controller.clock import Clock
from controller.registry import StateStore
from controller.schema import Directive, DirectiveKind
from service.wire import Wire

KEPT_PER_AGENT = 16


class Box(Wire):
    """The newest directives of one agent, oldest first."""

    agent_id: str
    directives: tuple[Directive, ...] = ()


class Mailboxes:
    """Directives of each agent, numbered over the whole fleet. Written first, handed out once they are announced."""

    def __init__(self, store: StateStore, boxes: Iterable[Box], *, seq: int) -> None:
        self._store = store
        self._boxes = {box.agent_id: box for box in boxes}
        self._news: dict[str, asyncio.Event] = {}
        self._unannounced: deque[tuple[int, str]] = deque()
        self._closed = False
        self._num_interrupts = 0
        self.seq = seq
        self._announced = seq

    def write(self, agent_id: str, kind: DirectiveKind, *, t_s: float, **fields: object) -> None:
        """As `write_all`, to one."""
        self.write_all([agent_id], kind, t_s=t_s, **fields)

    def write_all(self, agent_ids: Iterable[str], kind: DirectiveKind, *, t_s: float, **fields: object) -> None:
        """Number a directive to each of these agents and put it into the journal's queue."""
        told = Directive.model_validate({"seq": self.seq, "kind": kind, "t_s": t_s, **fields})
        for agent_id in agent_ids:
            self.seq += 1
            # What is over is handed out no more, and would be written to disk again with each that follows.
            old = [directive for directive in self._directives_of(agent_id) if not _is_over(directive, t_s)]
            kept = (*old, told.model_copy(update={"seq": self.seq}))[-KEPT_PER_AGENT:]
            # Of parts that were checked, a thousand at once.
            box = self._boxes[agent_id] = Box.model_construct(agent_id=agent_id, directives=kept)
            self._unannounced.append((self.seq, agent_id))
            self._store.put("directives", agent_id, box)
        self._store.put("meta", "directive_seq", str(self.seq))

    def announce(self, seq: int) -> None:
        """Hand out everything up to ``seq``."""
        if seq <= self._announced:
            return
        self._announced = seq
        while self._unannounced and self._unannounced[0][0] <= seq:
            event = self._news.pop(self._unannounced.popleft()[1], None)
            if event is not None:
                event.set()

    def close(self) -> None:
        """Let every poll answer now and from now on at once."""
        self._closed = True
        self._release_all()

    def interrupt(self) -> None:
        """Let every poll that waits now answer."""
        self._num_interrupts += 1
        self._release_all()

    def read(self, agent_id: str, *, after: int, now_s: float) -> list[Directive]:
        """Announced directives after a number, without syncs whose deadline has passed."""
        return [
            directive
            for directive in self._directives_of(agent_id)
            if after < directive.seq <= self._announced and not _is_over(directive, now_s)
        ]

    def _directives_of(self, agent_id: str) -> tuple[Directive, ...]:
        box = self._boxes.get(agent_id)
        return box.directives if box is not None else ()

    async def wait_for_news(self, agent_id: str, *, after: int, wait_s: float, clock: Clock) -> None:
        """Return when there is a directive to `read` after ``after``, at the latest after ``wait_s`` seconds.

        One whose deadline has passed is none: to answer for it would have the agent ask again at once, for ever.
        """
        deadline_s = time.monotonic() + wait_s
        begun = self._num_interrupts
        while (
            not self._closed and begun == self._num_interrupts and not self.read(agent_id, after=after, now_s=clock())
        ):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            event = self._news.setdefault(agent_id, asyncio.Event())
            try:
                async with asyncio.timeout(left_s):  # no task, as `wait_for` has it, for each of a thousand polls
                    await event.wait()
            except TimeoutError:
                return

    def forget(self, agent_ids: Iterable[str]) -> None:
        """Agents that are no longer known: nothing is for them."""
        for agent_id in agent_ids:
            if self._boxes.pop(agent_id, None) is not None:
                self._store.forget("directives", agent_id)
            event = self._news.pop(agent_id, None)
            if event is not None:
                event.set()

    def _release_all(self) -> None:
        news, self._news = self._news, {}
        for event in news.values():
            event.set()


def _is_over(directive: Directive, now_s: float) -> bool:
    return directive.deadline_s is not None and now_s >= directive.deadline_s
