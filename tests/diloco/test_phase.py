"""What a trainer tells about itself: exact totals, a record per trainer, and no trouble for the training."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.phase import PhaseClock, PhaseTeller, Waited
from diloco.trainer_schema import (
    TRAINER_BYTES,
    TRAINER_GLOB,
    TRAINER_PHASES,
    TrainerPhase,
    TrainerRecord,
    decode_trainer,
    encode_trainer,
)

NONE, INNER, SYNC = TRAINER_PHASES
RECORD = TrainerRecord(sequence=7, at_ns=123, none_ns=1, inner_ns=2, sync_ns=3, pid=4, slot=5, phase=SYNC)
S = 10**9
MAX = (1 << 64) - 1


class Time:
    """A clock and a safepoint's account, both moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 1000 * S
        self.waited = Waited()

    def pass_s(self, seconds: float, *, waited_s: float = 0.0, is_waiting: bool = False) -> None:
        self.now_ns += round(seconds * S)
        self.waited = Waited(self.waited.total_s + waited_s, is_waiting)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def tell(tmp_path: Path, time: Time) -> Iterator[Callable[..., PhaseTeller]]:
    tellers: list[PhaseTeller] = []

    def make(directory: Path = tmp_path) -> PhaseTeller:
        tellers.append(PhaseTeller(directory, slot=3, waited=lambda: time.waited, clock_ns=lambda: time.now_ns))
        return tellers[-1]

    yield make
    for teller in tellers:
        teller.close()


def records(directory: Path) -> list[TrainerRecord]:
    found = [decode_trainer(path.read_bytes()) for path in sorted(directory.glob(TRAINER_GLOB))]
    assert None not in found
    return [record for record in found if record is not None]


def spent_s(record: TrainerRecord) -> tuple[float, float, float]:
    return record.none_ns / S, record.inner_ns / S, record.sync_ns / S


COUNT = st.integers(0, MAX)


@given(
    st.builds(
        TrainerRecord,
        **dict.fromkeys(("sequence", "at_ns", "none_ns", "inner_ns", "sync_ns"), COUNT),
        pid=st.integers(0, (1 << 32) - 1),
        slot=st.integers(0, (1 << 16) - 1),
        phase=st.sampled_from(TRAINER_PHASES),
    )
)
def test_records_survive_the_file(record: TrainerRecord) -> None:
    raw = encode_trainer(record)
    assert len(raw) == TRAINER_BYTES
    assert decode_trainer(raw) == record


@given(st.integers(0, TRAINER_BYTES - 1), st.integers(1, 255))
def test_any_damaged_byte_is_seen(position: int, change: int) -> None:
    raw = bytearray(encode_trainer(RECORD))
    raw[position] ^= change
    assert decode_trainer(bytes(raw)) is None


@given(st.binary(max_size=2 * TRAINER_BYTES))
def test_garbage_is_no_record(raw: bytes) -> None:
    assert decode_trainer(raw) is None


STEP = st.tuples(st.sampled_from(TRAINER_PHASES), st.integers(0, 10 * S), st.floats(0, 12), st.booleans())


@given(st.lists(STEP, max_size=30))
def test_the_phases_share_out_all_of_the_time(steps: list[tuple[TrainerPhase, int, float, bool]]) -> None:
    clock, now_ns, total_s = PhaseClock(0), 0, 0.0
    for activity, passed_ns, waited_s, is_waiting in steps:
        before = dict(clock.spent_ns)
        now_ns, total_s = now_ns + passed_ns, total_s + waited_s
        clock.enter(activity, now_ns, Waited(total_s, is_waiting))
        assert all(clock.spent_ns[phase] >= before[phase] for phase in TrainerPhase)
        assert clock.phase in (activity, NONE)
    assert sum(clock.spent_ns.values()) == now_ns


def test_what_is_waited_at_the_gate_is_not_training(
    tell: Callable[..., PhaseTeller], time: Time, tmp_path: Path
) -> None:
    teller = tell()
    time.pass_s(2)
    teller.enter(INNER)
    time.pass_s(5, waited_s=1.5)
    teller.enter(SYNC)
    time.pass_s(0.25)
    teller.enter(INNER)
    (record,) = records(tmp_path)
    assert spent_s(record) == (3.5, 3.5, 0.25)
    assert (record.phase, record.slot, record.pid, record.at_ns) == (INNER, 3, os.getpid(), time.now_ns)
    time.pass_s(1, waited_s=1, is_waiting=True)
    teller.beat()
    (record,) = records(tmp_path)
    assert (spent_s(record), record.phase) == ((4.5, 3.5, 0.25), NONE)


def test_what_stays_the_same_is_not_written_again(tell: Callable[..., PhaseTeller], time: Time, tmp_path: Path) -> None:
    teller = tell()
    teller.enter(INNER)
    (before,) = records(tmp_path)
    time.pass_s(1)
    for _ in range(100):
        teller.enter(INNER)
    assert records(tmp_path) == [before]


def test_each_trainer_has_a_record_which_goes_with_it(tell: Callable[..., PhaseTeller], tmp_path: Path) -> None:
    one, two = tell(), tell()
    one.beat()
    assert len(records(tmp_path)) == 2
    one.close()
    one.beat()
    one.enter(SYNC)
    assert len(records(tmp_path)) == 1
    two.close()
    assert records(tmp_path) == []


def test_the_folder_belongs_to_the_server_and_may_come_later(
    tell: Callable[..., PhaseTeller], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gate"
    teller = tell(folder)
    teller.enter(INNER)
    teller.beat()
    assert not folder.exists()
    assert teller.complaint
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    folder.mkdir()
    teller.beat()
    assert [record.phase for record in records(folder)] == [INNER]
    assert not teller.complaint
    shutil.rmtree(folder)
    folder.mkdir()
    teller.beat()
    assert len(records(folder)) == 1


def test_the_record_of_a_killed_trainer_is_removed_by_the_next(
    tell: Callable[..., PhaseTeller], tmp_path: Path
) -> None:
    program = (
        "import sys, pathlib, time; from diloco.phase import PhaseTeller;"
        "t = PhaseTeller(pathlib.Path(sys.argv[1])); print('told', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        tell()
        assert len(records(tmp_path)) == 2
        process.send_signal(signal.SIGKILL)
    tell()
    assert {record.pid for record in records(tmp_path)} == {os.getpid()}


def test_a_trainer_without_a_gate_says_nothing() -> None:
    teller = PhaseTeller(None)
    threads = threading.active_count()
    teller.start()
    teller.enter(SYNC)
    teller.beat()
    teller.close()
    assert threading.active_count() == threads
