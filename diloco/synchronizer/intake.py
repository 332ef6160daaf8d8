"""Chunks become uploads and complete uploads are verified: what receiving offers and contributions have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TypeVar

from diloco.synchronizer.metrics import Direction, Metrics
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import Chunk, Name, Upload, Uploads
from service.errors import InputError, UnavailableError

T = TypeVar("T")


class Intake:
    """The uploads in progress. The caller sees to it that the chunks of one name come one at a time."""

    def __init__(self, disk: Disk, metrics: Metrics, *, limit: int) -> None:
        self._disk = disk
        self._metrics = metrics
        self._uploads = Uploads(limit=limit)
        self._scope = ""

    def beside(self, disk: Disk, *, scope: str) -> Intake:
        """Another intake under the same limit, whose names are its own."""
        other = Intake(disk, self._metrics, limit=0)
        other._uploads, other._scope = self._uploads, scope
        return other

    async def receive(
        self,
        name: Name,
        key: Hashable,
        chunk: Chunk,
        *,
        begin: Callable[[], Upload],
        verify: Callable[[Upload], T],
    ) -> tuple[Upload, T | None] | None:
        """Add a chunk to the upload of that name and key, and verify the whole once its last byte is there.

        Returns None when the chunk belongs to no upload and begins none, and no verification while bytes are missing.

        Raises:
            InputError: the whole is not what was announced or not acceptable; the upload is gone.
            UnavailableError: the disk fails; the upload stays if its file does, and the chunk may be sent again.
        """
        name = self._scoped(name)
        key = (self._scope, key, chunk.digest, chunk.total)
        upload = self._uploads.find(name, key)
        if upload is None:
            if chunk.start != 0:
                return None
            # Its file is written anew; half of that must not pass for the upload that was there before.
            self._uploads.discard(name)
            with self._disk.writing():
                upload = begin()
            self._uploads.put(name, key, upload)
        try:
            verified = await asyncio.to_thread(self._take, upload, chunk, verify)
        except InputError:
            self._uploads.discard(name)
            raise
        except UnavailableError:
            if not upload.path.exists():
                self._uploads.discard(name)
            raise
        self._metrics.bytes.labels(Direction.IN).inc(len(chunk.data))
        return upload, verified

    def settle(self, name: Name) -> None:
        """The upload's file has become something else; older epochs of its owner have nothing left to say."""
        self._uploads.settle(self._scoped(name))

    def discard_unless(self, keep: Callable[[Hashable], bool]) -> None:
        """Drop what is being uploaded here, but for that whose ``key`` may still count."""
        self._uploads.discard_unless(lambda key: isinstance(key, tuple) and (key[0] != self._scope or keep(key[1])))

    def _scoped(self, name: Name) -> Name:
        return Name(f"{self._scope}{name.owner}", name.epoch)

    def _take(self, upload: Upload, chunk: Chunk, verify: Callable[[Upload], T]) -> T | None:
        if not upload.wants(chunk) and not upload.is_complete:
            return None  # and no success of the disk
        with self._disk.writing():
            upload.append(chunk)
            return verify(upload) if upload.is_complete else None
