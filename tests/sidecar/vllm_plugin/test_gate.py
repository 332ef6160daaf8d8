"""Writer and reader of a gate on real files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.vllm_plugin.gate_reader import ALIVE_NS, REPLACED_NS, GateReader, GateReason, GateState, judge
from sidecar.vllm_plugin.gate_writer import GateWriter, Heartbeat
from sidecar.vllm_plugin.identity import own_identity
from sidecar.vllm_plugin.records import (
    GATE_BYTES,
    GATE_FILE,
    NUM_SLOTS,
    SLOT_BYTES,
    Slot,
    SlotFlag,
    encode_slot,
    gate_header,
    slot_offset,
)

REPOSITORY = Path(__file__).parents[3]
NOW_NS = 1_000_000_000_000
INGRESS = Slot(flags=SlotFlag.INGRESS, heartbeat_ns=NOW_NS, changed_ns=NOW_NS)
ENGINE = Slot(flags=SlotFlag.ENGINE, heartbeat_ns=NOW_NS, changed_ns=NOW_NS)
SIDECAR = Slot(flags=SlotFlag.SIDECAR, heartbeat_ns=NOW_NS, changed_ns=NOW_NS)
RUN = replace(SIDECAR, flags=SlotFlag.SIDECAR | SlotFlag.RUN_ORDERED)
SCRAPED = replace(SIDECAR, flags=SlotFlag.SIDECAR | SlotFlag.SCRAPED)
SILENT_NS = NOW_NS - ALIVE_NS - 1


@contextmanager
def writing(directory: Path, flags: int = SlotFlag.INGRESS, *, engine: int = 0) -> Iterator[GateWriter]:
    writer = GateWriter(directory, flags, engine=engine)
    yield writer
    writer.close()


@contextmanager
def reading(directory: Path, sources: int | None = None) -> Iterator[Callable[[], GateState]]:
    reader = GateReader(directory) if sources is None else GateReader(directory, sources=sources)
    yield lambda: reader.read(time.monotonic())
    reader.close()


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition did not come true in time"
        threading.Event().wait(0.005)


def test_a_request_closes_the_gate_and_its_end_opens_it(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        assert read() == GateState(False, GateReason.IDLE, "ingress", 0)
        writer.update(in_flight=2)
        assert read() == GateState(True, GateReason.IN_FLIGHT, "ingress", 2)
        writer.update(in_flight=0)
        assert not read().busy


def test_engine_steps_close_the_gate_where_ingress_is_not_counted(tmp_path: Path) -> None:
    with writing(tmp_path, SlotFlag.ENGINE) as writer, reading(tmp_path) as read:
        writer.update(running=1, waiting=2)
        assert read() == GateState(True, GateReason.ENGINE, "engine", None, 1, 2)


def test_counts_of_several_writers_are_added(tmp_path: Path) -> None:
    with writing(tmp_path) as one, writing(tmp_path) as other, reading(tmp_path) as read:
        one.update(in_flight=1)
        other.update(in_flight=2)
        assert read().in_flight == 3


def test_a_count_beyond_its_field_is_cut(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        writer.update(in_flight=1 << 40, running=-1)
        assert read().in_flight == (1 << 32) - 1


def test_a_reader_can_leave_sources_out(tmp_path: Path) -> None:
    with writing(tmp_path) as ingress, writing(tmp_path, SlotFlag.ENGINE), reading(tmp_path, SlotFlag.ENGINE) as read:
        ingress.update(in_flight=1)
        assert not read().busy


def test_no_file_is_busy_until_a_writer_comes(tmp_path: Path) -> None:
    directory = tmp_path / "later" / "8000"
    with reading(directory) as read:
        assert read() == GateState(True, GateReason.NO_FILE)
        with writing(directory):
            wait_until(lambda: not read().busy)


def test_a_writer_that_left_in_order_leaves_no_slot(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        writer.update(in_flight=5)
        writer.close()
        assert read() == GateState(True, GateReason.NO_WRITER)
    assert (tmp_path / GATE_FILE).read_bytes() == gate_header().ljust(GATE_BYTES, b"\0")


@pytest.mark.parametrize("content", [b"", b"x", b"#!/bin/sh\n" * 500, bytes(GATE_BYTES), bytes(7)])
def test_a_file_that_is_no_gate_is_busy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / GATE_FILE).write_bytes(content)
    with reading(tmp_path) as read:
        assert read() == GateState(True, GateReason.FOREIGN)


def test_a_gate_that_is_a_folder_is_busy(tmp_path: Path) -> None:
    (tmp_path / GATE_FILE).mkdir()
    with reading(tmp_path) as read:
        assert read() == GateState(True, GateReason.FOREIGN)


def test_a_truncated_gate_is_busy_and_its_writer_repairs_it(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        os.truncate(tmp_path / GATE_FILE, 10)
        assert read().reason is GateReason.FOREIGN
        writer.update(in_flight=1)  # lands beyond the end of the file, and must not hurt
        writer.beat()
        assert read() == GateState(True, GateReason.IN_FLIGHT, "ingress", 1)


def taken(directory: Path) -> list[int]:
    """The indices of the slots that are written."""
    raw = (directory / GATE_FILE).read_bytes()
    pieces = (raw[at : at + SLOT_BYTES] for at in map(slot_offset, range(NUM_SLOTS)))
    return [index for index, piece in enumerate(pieces) if any(piece)]


@pytest.mark.parametrize("num_bytes", [GATE_BYTES + 1, 100 << 20])
def test_a_gate_that_grew_is_as_good_as_before(tmp_path: Path, num_bytes: int) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        os.truncate(tmp_path / GATE_FILE, num_bytes)
        for _ in range(NUM_SLOTS + 1):
            writer.beat()
        assert (writer.complaint, taken(tmp_path)) == ("", [0])
        assert read() == GateState(False, GateReason.IDLE, "ingress", 0)


@pytest.mark.parametrize("num_bytes", [0, 3, 10, SLOT_BYTES, 2 * SLOT_BYTES, GATE_BYTES - 1])
@pytest.mark.parametrize("grows_again", [False, True])
def test_a_gate_that_was_cut_has_each_writer_once_again(tmp_path: Path, num_bytes: int, grows_again: bool) -> None:
    with writing(tmp_path) as one, writing(tmp_path) as other, reading(tmp_path) as read:
        os.truncate(tmp_path / GATE_FILE, num_bytes)
        if grows_again:
            os.truncate(tmp_path / GATE_FILE, GATE_BYTES)
        one.update(in_flight=1)
        for _ in range(3):
            one.beat()
            other.beat()
        assert len(taken(tmp_path)) == 2
        assert read() == GateState(True, GateReason.IN_FLIGHT, "ingress", 1)


def test_a_gate_whose_header_was_damaged_is_mended(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        with (tmp_path / GATE_FILE).open("r+b") as file:
            file.write(b"WDLGATE\x09")
        assert read().reason is GateReason.FOREIGN
        writer.beat()
        assert (read().reason, taken(tmp_path)) == (GateReason.IDLE, [0])


def test_a_gate_that_was_away_and_came_back_has_each_writer_once(tmp_path: Path) -> None:
    gate, away = tmp_path / GATE_FILE, tmp_path / "away"
    with writing(tmp_path) as ingress, writing(tmp_path, SlotFlag.ENGINE) as engine, writing(tmp_path) as other:
        for _ in range(2):
            gate.replace(away)
            for writer in (engine, other, ingress):
                writer.beat()
            away.replace(gate)
            for writer in (other, ingress, engine):
                writer.beat()
        assert len(taken(tmp_path)) == 3
        other.close()
        engine.close()
        assert len(taken(tmp_path)) == 1


def test_slots_that_a_living_process_left_behind_are_freed(tmp_path: Path) -> None:
    own = own_identity()
    left = replace(
        INGRESS, pid=own.pid, start_ticks=own.start_ticks, pid_namespace=own.pid_namespace, heartbeat_ns=1, in_flight=5
    )
    with writing(tmp_path):
        with (tmp_path / GATE_FILE).open("r+b") as file:
            file.seek(slot_offset(1))
            file.write(encode_slot(left) * (NUM_SLOTS - 1))
        with writing(tmp_path) as late, reading(tmp_path) as read:
            assert (late.complaint, taken(tmp_path)) == ("", [0, 1])
            assert read() == GateState(False, GateReason.IDLE, "ingress", 0)


def test_a_gate_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        assert not read().busy
        (tmp_path / GATE_FILE).unlink()
        writer.update(in_flight=1)
        writer.beat()
        wait_until(lambda: read().reason is GateReason.IN_FLIGHT)
        assert read().in_flight == 1


def test_a_gate_of_another_version_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / GATE_FILE).write_bytes(b"WDLGATE\x09".ljust(4096, b"?"))
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        assert writer.is_open
        assert not read().busy


def test_a_file_that_is_something_else_is_not_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / GATE_FILE).write_bytes(b"somebody's diary")
    with writing(tmp_path) as writer:
        writer.beat()
        writer.update(in_flight=1)
        assert not writer.is_open
    assert (tmp_path / GATE_FILE).read_bytes() == b"somebody's diary"
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "one line, however many heartbeats"


def test_a_folder_that_cannot_be_made_switches_the_gate_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with writing(tmp_path / "file" / "gate") as writer:
        writer.update(in_flight=1)
        writer.beat()
        assert not writer.is_open
    assert len(caplog.records) == 1


def test_a_folder_that_comes_later_is_taken_by_the_heartbeat(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with writing(blocked) as writer:
        assert not writer.is_open
        writer.update(in_flight=2)
        blocked.unlink()
        heartbeat = Heartbeat(period_s=0.01)
        heartbeat.add(writer.beat)
        wait_until(lambda: writer.is_open)
        heartbeat.stop()
        with reading(blocked) as read:
            assert read().in_flight == 2


def test_more_writers_than_slots_do_not_hurt(tmp_path: Path) -> None:
    writers = [GateWriter(tmp_path, SlotFlag.INGRESS) for _ in range(NUM_SLOTS + 1)]
    assert not writers[-1].is_open
    assert "slots" in writers[-1].complaint
    writers[0].close()
    writers[-1].beat()
    assert writers[-1].is_open
    for writer in writers:
        writer.close()


KILLED_WRITER = """
import sys, time
from pathlib import Path
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.records import SlotFlag
writer = GateWriter(Path(sys.argv[1]), SlotFlag.INGRESS)
writer.update(in_flight=7)
print("written", flush=True)
time.sleep(60)
"""


def test_a_killed_writer_leaves_no_count_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.wait(10)
    process.stdout.close()
    with reading(tmp_path) as read:
        assert read().in_flight == 7, "its heartbeat is fresh: nobody can know yet"
        with writing(tmp_path):
            assert read() == GateState(False, GateReason.IDLE, "ingress", 0)
    assert (tmp_path / GATE_FILE).read_bytes().count(b"\0") == GATE_BYTES - sum(map(bool, gate_header()))


def test_a_forked_child_does_not_write_its_parents_slot(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, reading(tmp_path) as read:
        writer._identity = replace(writer._identity, pid=writer._identity.pid + 1)
        writer.update(in_flight=9)
        writer.beat()
        writer.close()
        writer._identity = replace(writer._identity, pid=os.getpid())
        assert read() == GateState(False, GateReason.IDLE, "ingress", 0)


def test_a_reader_never_sees_half_of_a_write(tmp_path: Path) -> None:
    """Both counts always change together."""
    stop = threading.Event()
    with writing(tmp_path, SlotFlag.ENGINE) as writer, reading(tmp_path) as read:
        writer.update(running=0, waiting=0)

        def write() -> None:
            count = 0
            while not stop.is_set():
                count += 1
                writer.update(running=count, waiting=count)

        thread = threading.Thread(target=write)
        thread.start()
        # As often as threads get to take turns: on a busy machine many reads come before the first write.
        num_reads, deadline_s = 0, time.monotonic() + 30
        changes: set[tuple[float | None, float | None]] = set()
        while (num_reads < 5000 or len(changes) < 10) and time.monotonic() < deadline_s:
            state = read()
            num_reads += 1
            changes.add((state.running, state.waiting))
        stop.set()
        thread.join()
    assert len(changes) >= 10
    assert all(running == waiting for running, waiting in changes)


def always(_: object) -> bool:
    return True


def never(_: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("slots", "reason", "busy"),
    [
        ([], GateReason.NO_WRITER, True),
        ([INGRESS], GateReason.IDLE, False),
        ([replace(INGRESS, in_flight=1)], GateReason.IN_FLIGHT, True),
        ([INGRESS, replace(ENGINE, running=1)], GateReason.ENGINE, True),
        ([INGRESS, replace(ENGINE, running=1, changed_ns=NOW_NS - 3 * 10**9)], GateReason.IDLE, False),
        ([replace(ENGINE, running=1, changed_ns=NOW_NS - 3 * 10**9)], GateReason.ENGINE, True),
        ([ENGINE, replace(ENGINE, running=1, engine=1)], GateReason.ENGINE, True),
        ([ENGINE, replace(ENGINE, running=1, changed_ns=NOW_NS - 1)], GateReason.IDLE, False),
        ([SIDECAR], GateReason.NO_WRITER, True),
        ([SCRAPED], GateReason.IDLE, False),
        ([replace(SCRAPED, running=1)], GateReason.SCRAPED, True),
        ([replace(SCRAPED, waiting=1)], GateReason.SCRAPED, True),
        ([replace(SCRAPED, running=1), ENGINE], GateReason.IDLE, False),
        ([INGRESS, replace(SIDECAR, pace=0.0)], GateReason.NO_PACE, True),
        ([replace(INGRESS, in_flight=1), RUN], GateReason.RUN_ORDERED, False),
        ([INGRESS, RUN, replace(SIDECAR, pace=0.0)], GateReason.NO_PACE, True),
        ([INGRESS, replace(SIDECAR, pace=float("nan")), RUN], GateReason.NO_PACE, True),
        ([replace(INGRESS, in_flight=1), RUN, replace(SIDECAR, pace=0.5)], GateReason.RUN_ORDERED, False),
        ([INGRESS, RUN, RUN], GateReason.RUN_ORDERED, False),
        ([INGRESS, RUN, replace(SIDECAR, pace=0.0, heartbeat_ns=SILENT_NS)], GateReason.RUN_ORDERED, False),
        ([INGRESS, replace(SIDECAR, heartbeat_ns=SILENT_NS)], GateReason.SIDECAR_DEAD, True),
        ([INGRESS, SIDECAR, replace(SIDECAR, heartbeat_ns=SILENT_NS)], GateReason.IDLE, False),
        ([replace(INGRESS, heartbeat_ns=NOW_NS + 10**12)], GateReason.WRITER_SILENT, True),
    ],
)  # fmt: skip
def test_the_gate_follows_from_its_slots(slots: list[Slot], reason: GateReason, busy: bool) -> None:
    state = judge(slots, NOW_NS, is_dead=never)
    assert (state.reason, state.busy) == (reason, busy)


def test_a_silent_writer_counts_as_busy_unless_it_is_known_to_be_dead() -> None:
    slots = [INGRESS, replace(INGRESS, in_flight=3, heartbeat_ns=SILENT_NS)]
    assert judge(slots, NOW_NS, is_dead=never).reason is GateReason.WRITER_SILENT
    assert judge(slots, NOW_NS, is_dead=always) == GateState(False, GateReason.IDLE, "ingress", 0)
    assert judge(slots[1:], NOW_NS, is_dead=always) == GateState(True, GateReason.NO_WRITER)


@pytest.mark.parametrize("heartbeat_ns", [NOW_NS - REPLACED_NS - 1, NOW_NS + 10**15])
@pytest.mark.parametrize(
    ("slot", "other", "reason"),
    [
        (INGRESS, INGRESS, GateReason.IDLE),
        (replace(ENGINE, running=1), ENGINE, GateReason.IDLE),
        # Nobody speaks for them, or for the same engine.
        (INGRESS, ENGINE, GateReason.WRITER_SILENT),
        (replace(ENGINE, engine=1), ENGINE, GateReason.WRITER_SILENT),
    ],
)
def test_a_writer_of_another_container_is_replaced_by_its_successor(
    slot: Slot, other: Slot, reason: GateReason, heartbeat_ns: int
) -> None:
    gone = replace(slot, in_flight=3, heartbeat_ns=heartbeat_ns, pid=1, start_ticks=1, pid_namespace=1)
    assert judge([gone, other], NOW_NS).reason is reason
    assert judge([replace(gone, heartbeat_ns=SILENT_NS), other], NOW_NS).reason is GateReason.WRITER_SILENT


def test_a_writer_that_can_be_looked_up_is_never_replaced_while_it_lives() -> None:
    own = own_identity()
    stopped = replace(
        INGRESS,
        heartbeat_ns=NOW_NS - 2 * REPLACED_NS,
        pid=own.pid,
        start_ticks=own.start_ticks,
        pid_namespace=own.pid_namespace,
    )
    assert judge([stopped, INGRESS], NOW_NS).reason is GateReason.WRITER_SILENT


@pytest.mark.parametrize(("pace", "expected"), [(0.25, 0.25), (7.0, 1.0), (-1.0, 0.0), (float("nan"), 0.0)])
def test_pace_is_a_fraction_whatever_the_slot_holds(pace: float, expected: float) -> None:
    assert judge([INGRESS, replace(SIDECAR, pace=pace)], NOW_NS).pace == expected


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=2 * GATE_BYTES), st.booleans(), st.lists(st.tuples(st.integers(0, 30), st.binary(max_size=64)))
)
def test_no_content_of_the_file_makes_the_reader_raise_or_open_by_accident(
    tmp_path: Path, content: bytes, has_header: bool, patches: list[tuple[int, bytes]]
) -> None:
    raw = bytearray(gate_header() + content if has_header else content)
    for index, patch in patches:
        raw[slot_offset(index) : slot_offset(index) + len(patch)] = patch
    (tmp_path / GATE_FILE).write_bytes(bytes(raw))
    with reading(tmp_path) as read:
        state = read()
    assert state.busy
    assert not state.is_known


@settings(max_examples=100)
@given(st.lists(st.builds(Slot, heartbeat_ns=st.integers(0, 2 * NOW_NS), in_flight=st.integers(0, 9),
    running=st.integers(0, 9), pace=st.floats(width=32), flags=st.integers(0, 65535),
    pid=st.integers(0, 9))))  # fmt: skip
def test_whatever_valid_slots_say_an_open_gate_has_a_living_idle_writer_or_an_order(slots: list[Slot]) -> None:
    assert all(len(encode_slot(slot)) == SLOT_BYTES for slot in slots)
    state = judge(slots, NOW_NS, is_dead=never)
    if not state.busy:
        assert state.reason is GateReason.RUN_ORDERED or not (state.in_flight or state.running or state.waiting)
