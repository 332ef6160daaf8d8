"""The events of the last ticks, encoded once for all clients.

A client is a position in them, not a queue: whoever falls behind by more than `KEPT_TICKS` goes on from a snapshot, and
so does whoever comes back with the id of another process. Ids are ``<start of the process>-<number>``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass

from controller.dashboard.picture import Picture, difference, whole
from controller.dashboard.schema import Frame

KEPT_TICKS = 30


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    body: bytes


class Feed:
    """Numbered events. The first picture has the number 0."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(4)
        self._picture: Picture | None = None
        self._ticks: deque[Event] = deque(maxlen=KEPT_TICKS)
        self._snapshot: Event | None = None
        self._news = asyncio.Event()
        self.number = -1
        self.num_clients = 0
        self.closed = asyncio.Event()

    def publish(self, picture: Picture) -> None:
        """Say what has changed since the last picture."""
        before, self._picture = self._picture, picture
        self.number += 1
        self._snapshot = None
        if before is not None:
            body = self._encode("tick", self.number, difference(before, picture))
            self._ticks.append(Event(self.number, body))
        self._announce()

    def close(self) -> None:
        self.closed.set()
        self._announce()

    def parse_id(self, event_id: str | None) -> int | None:
        """The number in an id of this process; None for any other text."""
        boot, _, number = (event_id or "").rpartition("-")
        is_ours = boot == self._boot and number.isascii() and number.isdigit() and len(number) < 19
        return int(number) if is_ours and int(number) <= self.number else None

    def after(self, number: int) -> list[Event] | None:
        """The ticks after ``number``; None when they are not kept any more."""
        if number == self.number:
            return []
        if not self._ticks or number < self._ticks[0].number - 1:
            return None
        return [event for event in self._ticks if event.number > number]

    def snapshot(self) -> Event:
        """All of the newest picture; encoded once, whoever asks."""
        assert self._picture is not None
        if self._snapshot is None:
            self._snapshot = Event(self.number, self._encode("snapshot", self.number, whole(self._picture)))
        return self._snapshot

    async def wait(self, number: int, timeout_s: float) -> bool:
        """Wait until there is something after ``number``, at most ``timeout_s``; say whether there is."""
        if number == self.number and not self.closed.is_set():
            news = self._news
            try:
                # Not `wait_for`: before Python 3.12 it forgets a cancellation that comes together with the news.
                async with asyncio.timeout(timeout_s):
                    await news.wait()
            except TimeoutError:
                return False
        return number != self.number

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _encode(self, name: str, number: int, frame: Frame) -> bytes:
        # One line: JSON spells a line break as \n.
        body = frame.model_dump_json()
        return f"id: {self._boot}-{number}\nevent: {name}\ndata: {body}\n\n".encode()
