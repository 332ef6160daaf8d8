"""Whatever lies in a gate's folder under the name of one of its files: nobody waits for it, and nobody raises."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.trainer_schema import TRAINER_GLOB
from sidecar.doctor_gate import look_at_gate
from sidecar.pace_order import ORDER_FILE, keep_order, read_order
from sidecar.schema import PaceMode
from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.trainers import read_trainer
from sidecar.vllm_plugin.files import open_regular
from sidecar.vllm_plugin.gate_reader import GateReader, GateReason
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.records import GATE_FILE, SlotFlag
from sidecar.vllm_plugin.step_ring import StepRing, remove_dead_rings

RING_FILE = "steps-0-1.ring"


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def make_link_to_file(path: Path) -> None:
    path.with_name("diary").write_text("somebody's")
    path.symlink_to(path.with_name("diary"))


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


MAKERS: list[Callable[[Path], None]] = [
    os.mkfifo,
    Path.mkdir,
    make_link_to_pipe,
    make_link_to_file,
    make_socket,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path.name),
]
strange = pytest.mark.parametrize("make", MAKERS)


@strange
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match="file"):
            open_regular(tmp_path / "file", flags)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@strange
def test_the_plugin_keeps_its_records_beside_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / RING_FILE)
    remove_dead_rings(tmp_path)
    ring, source = StepRing(tmp_path, engine=0), RingSource(tmp_path, parse_slo("e2e:1s"))
    assert source.read(t_s=0.0, monotonic_s=time.monotonic()) is not None
    source.close()
    ring.close()
    assert os.path.lexists(tmp_path / RING_FILE), "it is somebody's"


@strange
def test_a_ring_whose_own_path_it_takes_is_off(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / f"steps-0-{os.getpid()}.ring")
    ring = StepRing(tmp_path, engine=0)
    ring.beat()
    ring.write([b"record"])
    ring.close()
    assert caplog.text.count("step records are off") == len(caplog.records) == 1


@strange
def test_a_gate_that_it_takes_is_foreign(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / GATE_FILE)
    writer, reader = GateWriter(tmp_path, SlotFlag.INGRESS), GateReader(tmp_path)
    writer.beat()
    assert not writer.is_open
    assert writer.complaint
    assert reader.read(time.monotonic()).reason is GateReason.FOREIGN
    assert look_at_gate(tmp_path, is_required=True, now_ns=0, t_s=0.0).error
    reader.close()
    writer.close()


@strange
def test_orders_and_trainers_are_not_read_from_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    order, trainer = tmp_path / "a" / ORDER_FILE, tmp_path / "b" / TRAINER_GLOB.replace("*", "1-1")
    beside = tmp_path / "c" / f"{ORDER_FILE}.new"
    for path in (order, trainer, beside):
        path.parent.mkdir()
        make(path)
    assert read_order(order.parent) is PaceMode.AUTO
    assert read_trainer(trainer) is None
    keep_order(beside.parent, PaceMode.PAUSE)  # what lies beside it does not matter
    assert read_order(beside.parent) is PaceMode.PAUSE
