"""What the sidecar makes of the trainers' records: exact differences, one phase per interval, no faith in files."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.trainer_schema import TRAINER_BYTES, TrainerPhase, TrainerRecord, encode_trainer
from sidecar.calibrator import Phase
from sidecar.trainers import ALIVE_NS, MAX_TRAINERS, MIN_SHARE, TrainerWatch, phase_of, read_trainer, strongest

NONE, INNER, SYNC = Phase
S = 10**9
START_NS = 1000 * S
NOISE = random.Random(7).randbytes(TRAINER_BYTES)


class Told:
    """A trainer's file, written by hand; `now_ns` moves with what it tells."""

    def __init__(self, directory: Path, name: str = "1-a") -> None:
        self.path = directory / f"trainer-{name}.phase"
        self.now_ns = START_NS
        self._spent_ns = dict.fromkeys(Phase, 0)
        self._sequence = itertools.count(1)
        self.tell(NONE, 0)

    def tell(self, phase: Phase, seconds: float, *, then: Phase | None = None) -> int:
        """So many seconds in a phase went by; returns the time."""
        self.now_ns += round(seconds * S)
        self._spent_ns[phase] += round(seconds * S)
        self.path.write_bytes(
            encode_trainer(
                TrainerRecord(
                    sequence=next(self._sequence),
                    at_ns=self.now_ns,
                    none_ns=self._spent_ns[NONE],
                    inner_ns=self._spent_ns[INNER],
                    sync_ns=self._spent_ns[SYNC],
                    phase=TrainerPhase(then or phase),
                )
            )
        )
        return self.now_ns


@pytest.fixture
def trainer(tmp_path: Path) -> Told:
    return Told(tmp_path)


@pytest.fixture
def watch(trainer: Told, tmp_path: Path) -> TrainerWatch:
    watch = TrainerWatch(tmp_path, now_ns=START_NS)
    watch.poll(START_NS)
    assert watch.take() is NONE
    return watch


def taken(watch: TrainerWatch, now_ns: int) -> Phase:
    watch.poll(now_ns)
    return watch.take()


@pytest.mark.parametrize(
    ("spent", "phase"),
    [
        ({SYNC: 1.0}, SYNC),
        ({SYNC: 0.1, INNER: 0.9}, SYNC),
        ({SYNC: 0.09, INNER: 0.91}, INNER),
        ({SYNC: 0.09, NONE: 0.91}, NONE),
        ({INNER: 0.1, NONE: 0.9}, INNER),
        ({INNER: 0.09, NONE: 0.91}, NONE),
        # Told late: what was told is more than the interval, and its shares count.
        ({SYNC: 0.5, INNER: 9.5}, INNER),
        # Killed early in the interval: the rest of it was undisturbed.
        ({INNER: 0.05}, NONE),
    ],
)
def test_the_phase_of_a_mixed_interval(spent: dict[Phase, float], phase: Phase) -> None:
    assert MIN_SHARE == 0.1
    assert phase_of({**dict.fromkeys(Phase, 0.0), **spent}, interval_s=1.0, now=NONE) is phase


SECONDS = st.floats(0, 100)


@given(SECONDS, SECONDS, SECONDS, st.floats(0.01, 100), st.floats(0, 10))
def test_more_sync_never_makes_an_interval_weaker(
    none: float, inner: float, sync: float, interval_s: float, more: float
) -> None:
    def strength(sync_s: float) -> int:
        phase = phase_of({NONE: none, INNER: inner, SYNC: sync_s}, interval_s=interval_s, now=NONE)
        return [NONE, INNER, SYNC].index(phase)

    if strength(sync) == 2:
        assert strength(sync + more) == 2


def test_the_strongest_of_several_trainers_counts(watch: TrainerWatch, trainer: Told, tmp_path: Path) -> None:
    other = Told(tmp_path, "2-b")
    watch.poll(START_NS)
    trainer.tell(NONE, 1.0)
    assert taken(watch, other.tell(INNER, 1.0)) is INNER
    trainer.tell(SYNC, 1.0)
    assert taken(watch, other.tell(INNER, 1.0)) is SYNC
    assert watch.status().num_trainers == 2
    assert watch.total_s == {NONE: 1.0, INNER: 2.0, SYNC: 1.0}
    assert strongest([]) is NONE


def test_a_short_sync_between_two_scrapes_is_seen(watch: TrainerWatch, trainer: Told) -> None:
    trainer.tell(INNER, 0.5)
    trainer.tell(SYNC, 0.2)
    assert taken(watch, trainer.tell(INNER, 0.3)) is SYNC
    assert taken(watch, trainer.tell(INNER, 1.0)) is INNER
    assert taken(watch, trainer.tell(NONE, 1.0)) is NONE


def test_an_interval_lasts_until_it_is_taken(watch: TrainerWatch, trainer: Told) -> None:
    watch.poll(trainer.tell(SYNC, 1.0))  # a scrape that failed
    assert taken(watch, trainer.tell(NONE, 1.0)) is SYNC
    assert watch.total_s[SYNC] == 1.0


def test_between_two_beats_the_last_word_counts(watch: TrainerWatch, trainer: Told) -> None:
    now_ns = trainer.tell(INNER, 0.2, then=SYNC)
    assert taken(watch, now_ns) is INNER
    assert taken(watch, now_ns + S // 10) is SYNC


def test_a_dead_trainer_does_nothing(watch: TrainerWatch, trainer: Told) -> None:
    now_ns = trainer.tell(INNER, 1.0)
    assert taken(watch, now_ns) is INNER
    assert taken(watch, now_ns + ALIVE_NS) is INNER
    assert taken(watch, now_ns + ALIVE_NS + 1) is NONE
    assert watch.status().num_trainers == 0


def test_a_trainer_that_left_still_counts_for_its_last_interval(watch: TrainerWatch, trainer: Told) -> None:
    watch.poll(trainer.tell(SYNC, 1.0))
    trainer.path.unlink()
    assert taken(watch, trainer.now_ns) is SYNC
    assert taken(watch, trainer.now_ns + S) is NONE


def test_a_record_of_an_earlier_boot_is_dead(tmp_path: Path) -> None:
    trainer = Told(tmp_path)
    trainer.tell(INNER, 10_000.0)
    watch = TrainerWatch(tmp_path, now_ns=START_NS)
    assert taken(watch, START_NS) is NONE
    assert watch.status().num_trainers == 0


def test_what_was_before_the_sidecar_started_is_not_its_news(tmp_path: Path) -> None:
    trainer = Told(tmp_path)
    watch = TrainerWatch(tmp_path, now_ns=trainer.tell(SYNC, 100.0, then=NONE))
    assert taken(watch, trainer.now_ns) is NONE
    assert watch.total_s == dict.fromkeys(Phase, 0.0)


@pytest.mark.parametrize("content", [b"", b"x", bytes(TRAINER_BYTES), NOISE, b"y" * 10_000])
def test_a_file_that_is_no_record_is_no_trainer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trainer-1-a.phase").write_bytes(content)
    watch = TrainerWatch(tmp_path, now_ns=START_NS)
    assert taken(watch, START_NS) is NONE


def test_links_pipes_folders_and_a_missing_folder_are_no_trainers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trainer-1-fifo.phase")
    (tmp_path / "trainer-2-folder.phase").mkdir()
    real = Told(tmp_path / "..", "real")
    (tmp_path / "trainer-3-link.phase").symlink_to(real.path)
    for directory in (tmp_path, tmp_path / "nowhere"):
        watch = TrainerWatch(directory, now_ns=START_NS)
        assert taken(watch, START_NS) is NONE
        assert watch.status().num_trainers == 0
    real.path.unlink()


def test_a_folder_full_of_records_is_bounded(tmp_path: Path) -> None:
    for number in range(MAX_TRAINERS + 10):
        Told(tmp_path, f"{number}-a")
    watch = TrainerWatch(tmp_path, now_ns=START_NS)
    watch.poll(START_NS)
    assert watch.status().num_trainers == MAX_TRAINERS


@pytest.fixture
def torn_file(tmp_path: Path) -> Iterator[Path]:
    """A record that a thread keeps rewriting with totals that agree with its sequence."""
    path = tmp_path / "trainer-1-a.phase"
    path.touch()
    stop, begun = threading.Event(), threading.Event()

    def write() -> None:
        with path.open("r+b", buffering=0) as file:
            for sequence in itertools.count(1):
                record = TrainerRecord(sequence=sequence, at_ns=sequence, inner_ns=sequence, sync_ns=3 * sequence)
                os.pwrite(file.fileno(), encode_trainer(record), 0)
                begun.set()
                if stop.is_set():
                    return

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(10)
    yield path
    stop.set()
    thread.join()


def test_a_record_is_whole_while_it_is_being_written(torn_file: Path) -> None:
    seen = 0
    for _ in range(2000):
        record = read_trainer(torn_file)
        if record is not None:
            assert (record.at_ns, record.inner_ns, record.sync_ns) == (
                record.sequence,
                record.sequence,
                3 * record.sequence,
            )
            seen += 1
    assert seen > 1000
