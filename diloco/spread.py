"""One transfer by several senders side by side: each takes the next chunk that nobody has.

What limits one sender is the time from the end of a chunk to the synchronizer's answer, in which it sends nothing, and
its core, which takes digests and encrypts. Chunks of an upload therefore reach the synchronizer ahead of their turn; it
keeps them, and says so (`ChunkReply.ahead`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from diloco.digest import ByteRange
from diloco.schema import CHUNK_BYTES, ChunkReply, InitReply

R = TypeVar("R", InitReply, ChunkReply)


def send_side_by_side(senders: Sequence[Callable[[ByteRange], R]], *, start: int, total: int) -> R | None:
    """Send the bytes from ``start`` on; returns the answer that tells of the most, None where nothing was to be sent.

    It ends before everything is sent when a chunk does not stay: the synchronizer has started anew, or takes none ahead
    of its turn. The first error of a sender is raised once all have come to their end.
    """
    transfer = _Transfer(range(start, total, CHUNK_BYTES))
    best: list[R] = []

    def send(sender: Callable[[ByteRange], R], first: int) -> None:
        reply = sender(ByteRange(first, min(first + CHUNK_BYTES, total), total))
        ahead = reply.ahead if isinstance(reply, ChunkReply) else ()
        stays = reply.complete or first < reply.received_bytes or first in ahead
        with transfer.lock:
            if not best or (reply.complete, reply.received_bytes) > (best[0].complete, best[0].received_bytes):
                best[:] = [reply]
        if reply.complete or not stays:
            transfer.end()

    transfer.run([partial(send, sender) for sender in senders])
    return best[0] if best else None


def fetch_side_by_side(fetchers: Sequence[Callable[[int], object]], starts: Iterable[int]) -> None:
    """Fetch the chunks that begin there. The first error is raised once all have come to their end."""
    _Transfer(starts).run(fetchers)


class _Transfer:
    """Chunks that are left, by where they begin."""

    def __init__(self, starts: Iterable[int]) -> None:
        self.lock = threading.Lock()
        self._starts = deque(starts)
        self._errors: list[BaseException] = []

    def end(self) -> None:
        """Begin no other chunk."""
        with self.lock:
            self._starts.clear()

    def run(self, workers: Sequence[Callable[[int], object]]) -> None:
        with ThreadPoolExecutor(len(workers), thread_name_prefix="chunks") as threads:
            for worker in workers:
                threads.submit(self._work, worker)
        if self._errors:
            raise self._errors[0]

    def _work(self, worker: Callable[[int], object]) -> None:
        while (first := self._next()) is not None:
            try:
                worker(first)
            except BaseException as exc:  # noqa: BLE001 (raised where the transfer was begun)
                with self.lock:
                    self._errors.append(exc)
                self.end()

    def _next(self) -> int | None:
        with self.lock:
            return self._starts.popleft() if self._starts else None
