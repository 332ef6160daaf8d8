"""What one answer to a pull is cut from: a generation's parameters, or the deltas that lead to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, Self

from diloco.applied import format_applied
from diloco.digest import format_digest
from diloco.schema import APPLIED_HEADER, CODECS_HEADER, RESULT_HEADER, RUN_HEADER, VERSION_HEADER
from diloco.synchronizer.generation import Generation
from diloco.synchronizer.published import Published


class Opened:
    """Parts of files one after another; a context manager that closes them."""

    def __init__(self, parts: Iterable[tuple[BinaryIO, int]], files: ExitStack) -> None:
        """``parts``: each file, at its first byte, and how many there are; ``files`` closes them."""
        self._parts = deque(parts)
        self._files = files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, size: int) -> bytes:
        """The next bytes, as many as there are up to ``size``."""
        pieces = []
        while size and self._parts:
            file, left = self._parts.popleft()
            pieces.append(file.read(min(size, left)))
            size -= len(pieces[-1])
            if pieces[-1] and left > len(pieces[-1]):
                self._parts.appendleft((file, left - len(pieces[-1])))
        return b"".join(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The bytes on offer to one island."""

    generation: Generation
    slot: int | None = None
    """Who asks, if it says so."""
    chain: tuple[Generation, ...] = ()
    """The generations whose deltas make it up; none where it is the parameters themselves."""

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes) if self.chain else self.generation.num_bytes

    @property
    def headers(self) -> dict[str, str]:
        digest = format_digest(self.generation.digest)
        common = {
            VERSION_HEADER: str(self.generation.version),
            RUN_HEADER: self.generation.run,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if self.slot is not None:
            common[APPLIED_HEADER] = format_applied(self.generation.outcome.last.get(self.slot))
        if not self.chain:
            return common | {"Repr-Digest": digest}
        codecs = ",".join(link.delta.codec for link in self.chain if link.delta is not None)
        return common | {CODECS_HEADER: codecs, RESULT_HEADER: digest}

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the whole, from disk."""
        if not self.chain:
            return self.generation.read(start, stop)
        pieces, offset = [], 0
        for link, size in zip(self.chain, self._sizes, strict=True):
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last:
                pieces.append(link.read_delta(first, last))
            offset += size
        return b"".join(pieces)

    def open(self) -> Opened:
        """The whole, from the first byte on, whatever becomes of the files meanwhile.

        Raises:
            FileNotFoundError: they are not kept any more.
        """
        with ExitStack() as files:
            if not self.chain:
                parts = [(files.enter_context(self.generation.open()), self.generation.num_bytes)]
            else:
                links = zip(self.chain, self._sizes, strict=True)
                parts = [(files.enter_context(link.open_delta()), size) for link, size in links]
            return Opened(parts, files.pop_all())

    @property
    def _sizes(self) -> list[int]:
        return [link.delta.num_bytes for link in self.chain if link.delta is not None]


def download(
    published: Published, version: int | None, base_version: int | None, *, slot: int | None = None
) -> Download:
    """What an island gets that asks for a version, or the newest, and says which one it has.

    Raises:
        VersionGoneError: that version is not kept.
    """
    generation = published.get(version)
    chain = () if base_version is None else published.chain(base_version, generation)
    return Download(generation=generation, slot=slot, chain=chain)
