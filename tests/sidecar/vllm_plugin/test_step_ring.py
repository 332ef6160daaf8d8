"""The ring of step records on a file that others replace, damage and cut, and on a disk that is full."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.source.snapshot import EngineSnapshot
from sidecar.vllm_plugin.records import (
    RECORD_BYTES,
    RING_CAPACITY,
    RING_HEADER_BYTES,
    StepRecord,
    decode_pulse,
    encode_record,
)
from sidecar.vllm_plugin.step_ring import RING_BYTES, StepRing


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[StepRing]:
    ring = StepRing(tmp_path, engine=0)
    yield ring
    ring.close()


def path_of(directory: Path) -> Path:
    return directory / f"steps-0-{os.getpid()}.ring"


def write(ring: StepRing, count: int = 1) -> None:
    for _ in range(count):
        number = ring.next_sequence
        record = StepRecord(sequence=number, at_ns=time.monotonic_ns(), step=number, running=1, waiting=0, kv_usage=0.5)
        ring.write([encode_record(record)])


def read(directory: Path) -> EngineSnapshot | None:
    source = RingSource(directory, parse_slo("e2e:1s"))
    try:
        return source.read(t_s=0.0, monotonic_s=time.monotonic())
    finally:
        source.close()


def pulse(directory: Path) -> tuple[int, int] | None:
    return decode_pulse(path_of(directory).read_bytes()[:RING_HEADER_BYTES])


@contextmanager
def full_after(num_records: int) -> Iterator[None]:
    """No file can be written beyond the place of so many records."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RING_HEADER_BYTES + num_records * RECORD_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * RING_HEADER_BYTES)


def put_another(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(bytes(RING_BYTES))
    beside.replace(path)


@pytest.mark.parametrize(
    "damage",
    [
        overwrite,
        put_another,
        Path.unlink,
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, RING_HEADER_BYTES + 7),
        lambda path: path.write_bytes(b"diary" * RING_BYTES),
    ],
)
def test_the_next_heartbeat_mends_it(tmp_path: Path, ring: StepRing, damage: Callable[[Path], None]) -> None:
    write(ring, 3)
    damage(path_of(tmp_path))
    ring.beat()
    write(ring)
    snapshot = read(tmp_path)
    assert snapshot is not None
    assert snapshot.steps == 4


def test_a_ring_that_only_grew_or_lost_its_header_keeps_its_records(tmp_path: Path, ring: StepRing) -> None:
    write(ring, 3)
    os.truncate(path_of(tmp_path), 2 * RING_BYTES)
    overwrite(path_of(tmp_path))
    ring.beat()
    snapshot = read(tmp_path)
    assert snapshot is not None
    assert snapshot.steps == 3


def test_a_full_disk_is_one_line_and_silence_until_there_is_room(
    tmp_path: Path, ring: StepRing, caplog: pytest.LogCaptureFixture
) -> None:
    write(ring, 8)
    ring.beat()
    before = pulse(tmp_path)
    for _ in range(3):  # room comes and goes
        with full_after(8):
            for _ in range(5):
                write(ring)
                ring.beat()
            assert pulse(tmp_path) == before, "a ring that cannot tell of steps must not look idle"
        ring.beat()
        assert pulse(tmp_path) != before
        before = pulse(tmp_path)
        snapshot = read(tmp_path)
        assert snapshot is not None
        assert snapshot.steps == ring.next_sequence - 1, "the last step is told once there is room"
    assert [record.getMessage().split(" path")[0] for record in caplog.records] == ["step records are off"]


def test_another_failure_after_a_whole_ring_of_records_is_another_line(
    ring: StepRing, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with full_after(0):
            write(ring)
        write(ring, RING_CAPACITY + 1)
    assert len(caplog.records) == 2


def test_a_ring_that_was_closed_stays_away(tmp_path: Path, ring: StepRing) -> None:
    ring.close()
    ring.beat()
    write(ring)
    assert not list(tmp_path.iterdir())
