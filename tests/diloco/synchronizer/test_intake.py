"""Intake on a disk that fails: nothing half written passes for received, and the problem lasts until a write works."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from diloco.digest import sha256
from diloco.synchronizer.intake import Intake
from diloco.synchronizer.metrics import Metrics
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import Chunk, Name, Upload, part_path
from service.errors import UnavailableError

DATA = bytes(range(100))
NAME = Name("slot-0", 1)


class Sender:
    """Sends chunks of the same bytes under different keys."""

    def __init__(self, directory: Path) -> None:
        self.disk = Disk(directory)
        self._intake = Intake(self.disk, Metrics(), limit=4)
        self.path = part_path(directory, NAME)

    def send(self, key: str, start: int, stop: int, *, fails: bool = False) -> int | None:
        def begin() -> Upload:
            if fails:
                self.path.write_bytes(b"")
                raise OSError(errno.ENOSPC, "No space left on device")
            return Upload(self.path, total=len(DATA), digest=sha256(DATA))

        chunk = Chunk(start=start, total=len(DATA), digest=sha256(DATA), data=DATA[start:stop])
        received = asyncio.run(
            self._intake.receive(NAME, key, chunk, begin=begin, verify=lambda upload: upload.path.read_bytes())
        )
        return None if received is None else received[0].received


def test_an_upload_whose_file_gave_way_to_one_that_failed_starts_over(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    assert sender.send("a", 0, 50) == 50
    with pytest.raises(UnavailableError, match="No space left"):
        sender.send("b", 0, 50, fails=True)
    assert sender.send("a", 50, 100) is None
    assert sender.send("a", 0, 50) == 50
    assert sender.send("a", 50, 100) == 100
    assert sender.path.read_bytes() == DATA


def test_a_problem_of_the_disk_lasts_until_something_is_written(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    with pytest.raises(UnavailableError):
        sender.send("a", 0, 50, fails=True)
    assert sender.disk.problem is not None
    assert sender.send("a", 10, 20) is None
    assert sender.disk.problem is not None
    sender.send("a", 0, 50)
    assert sender.disk.problem is None


def test_an_upload_whose_file_somebody_removed_starts_over_and_is_no_problem_of_the_disk(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    sender.send("a", 0, 50)
    sender.path.unlink()
    with pytest.raises(UnavailableError):
        sender.send("a", 50, 100)
    assert sender.disk.problem is None
    assert sender.send("a", 50, 100) is None
    assert sender.send("a", 0, 100) == 100
