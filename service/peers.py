"""The processes that can give one service, of which one does at a time: who asks stays with the one that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Peers:
    """Base URLs in the order in which they are tried."""

    def __init__(self, urls: Sequence[str]) -> None:
        assert urls
        self._urls = tuple(urls)
        self._index = 0
        self.moved = asyncio.Event()
        """Of the peer in use; set when it is left, and another event then stands for the next."""

    def __len__(self) -> int:
        return len(self._urls)

    @property
    def current(self) -> str:
        return self._urls[self._index]

    def leave(self, url: str) -> None:
        """Go on to the next, unless that happened already."""
        if url != self.current or len(self) == 1:
            return
        self._index = (self._index + 1) % len(self)
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()


def split_urls(text: str) -> tuple[str, ...]:
    """The URLs of a list with commas."""
    return tuple(url.strip() for url in text.split(",") if url.strip())
