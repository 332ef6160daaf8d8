"""The folder of a gate, as the doctor sees it: who writes, who may, and what it is when it is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.doctor_checks import Check, Finding, Status, printable
from sidecar.doctor_evidence import Evidence, GateEvidence, ServerEvidence
from sidecar.doctor_findings import findings
from sidecar.doctor_gate import look_at_gate
from sidecar.doctor_server import bearable_interval_s
from sidecar.slo import parse_slo
from sidecar.source.snapshot import ScrapeOutcome
from sidecar.vllm_plugin.records import GATE_BYTES, GATE_FILE, NUM_SLOTS, Slot, SlotFlag, encode_slot, gate_header
from tests.sidecar.helpers import bad

NOW_NS = 10**12
GOOD = GateEvidence(
    directory=Path("/gate"), is_required=False, user=1, exists=True, owner=1, is_readable=True, is_writable=True
)
REFUSED = bad(ScrapeOutcome.REFUSED, t_s=1.0)
SERVER = ServerEvidence(url="http://host:8000", host="host", is_local=True, results=(REFUSED,))


def write_gate(directory: Path, *slots: Slot) -> None:
    raw = gate_header() + b"".join(map(encode_slot, slots))
    (directory / GATE_FILE).write_bytes(raw.ljust(GATE_BYTES, b"\0"))


def look(directory: Path) -> GateEvidence:
    return look_at_gate(directory, is_required=True, now_ns=NOW_NS, t_s=0.0)


def judged(gate: GateEvidence | None, **server: Any) -> dict[Check, Finding]:
    evidence = Evidence(server=replace(SERVER, **server), gate=gate)
    return {finding.check: finding for finding in findings(evidence, parse_slo("e2e:1s"))}


def test_living_and_dead_writers_are_told_apart(tmp_path: Path) -> None:
    living = Slot(flags=SlotFlag.INGRESS, heartbeat_ns=NOW_NS - 10**8, in_flight=3)
    write_gate(tmp_path, living, replace(living, in_flight=2), replace(living, heartbeat_ns=1))
    seen = look(tmp_path)
    assert (seen.num_ingress, seen.in_flight, seen.ahead_s, seen.error) == (2, 5, 0.0, "")


def test_a_writer_of_another_clock_is_seen(tmp_path: Path) -> None:
    write_gate(tmp_path, Slot(flags=SlotFlag.INGRESS, heartbeat_ns=NOW_NS + 5 * 10**9))
    assert look(tmp_path).ahead_s == 5.0
    assert judged(look(tmp_path))[Check.CLOCK].status is Status.FAIL


def make_garbage(path: Path) -> None:
    (path / GATE_FILE).write_bytes(os.urandom(GATE_BYTES))


def make_short(path: Path) -> None:
    (path / GATE_FILE).write_bytes(gate_header())


def make_folder(path: Path) -> None:
    (path / GATE_FILE).mkdir()


def make_fifo(path: Path) -> None:
    os.mkfifo(path / GATE_FILE)


@pytest.mark.parametrize("make", [make_garbage, make_short, make_folder, make_fifo])
def test_a_file_that_is_no_gate_is_an_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    seen = look(tmp_path)
    assert seen.error
    assert judged(seen)[Check.FOLDER].status is Status.FAIL


def test_torn_slots_and_an_empty_folder_are_no_error(tmp_path: Path) -> None:
    assert look(tmp_path).error == ""
    (tmp_path / GATE_FILE).write_bytes(gate_header() + os.urandom(64 * NUM_SLOTS))
    assert (look(tmp_path).error, look(tmp_path).num_ingress) == ("", 0)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert look(tmp_path / "file").error == "is not a folder"
    assert not look(tmp_path / "nowhere").exists


@pytest.mark.parametrize(
    ("gate", "check", "status", "said"),
    [
        (GOOD, Check.FOLDER, Status.OK, "can be read and written"),
        (replace(GOOD, is_writable=False, owner=7), Check.FOLDER, Status.WARN, "uid 7"),
        (replace(GOOD, is_writable=False, is_required=True), Check.FOLDER, Status.FAIL, "cannot write"),
        (replace(GOOD, is_readable=False), Check.FOLDER, Status.WARN, "cannot read"),
        (replace(GOOD, exists=False), Check.FOLDER, Status.WARN, "does not exist"),
        (replace(GOOD, exists=False, is_required=True), Check.FOLDER, Status.FAIL, "does not exist"),
        (GOOD, Check.MIDDLEWARE, Status.WARN, "absent"),
        (replace(GOOD, num_ingress=2, in_flight=1), Check.MIDDLEWARE, Status.OK, "2 API-server processes"),
        (GOOD, Check.PLUGIN, Status.WARN, "absent"),
        (replace(GOOD, plugin_engines=1, max_num_seqs=8), Check.PLUGIN, Status.OK, "1 engine, at most 8"),
        (replace(GOOD, num_trainers=2), Check.TRAINERS, Status.OK, "2 trainers"),
        (replace(GOOD, ahead_s=0.6), Check.CLOCK, Status.FAIL, "time namespace"),
    ],
)
def test_what_the_folder_means(gate: GateEvidence, check: Check, status: Status, said: str) -> None:
    finding = judged(gate)[check]
    assert finding.status is status
    assert said in f"{finding.message} {finding.remedy}"
    assert (finding.remedy is None) == (status is Status.OK)


@pytest.mark.parametrize("is_required", [False, True])
def test_only_a_guessed_folder_may_be_another_one(is_required: bool) -> None:
    remedy = judged(replace(GOOD, exists=False, is_required=is_required))[Check.FOLDER].remedy or ""
    assert "pip install" in remedy
    assert ("or give --gate, if the server has another WADILOCO_GATE_DIR" in remedy) is not is_required


def test_a_gate_on_another_host_is_not_looked_for() -> None:
    found = judged(None, is_local=False)
    assert found[Check.HOST].status is Status.WARN
    assert Check.FOLDER not in found


@pytest.mark.parametrize(
    ("scrape_s", "interval_s"), [(0.001, 0.1), (0.005, 0.1), (0.006, 0.2), (0.05, 1.0), (0.4, 8.0)]
)
def test_the_cadence_that_a_server_bears(scrape_s: float, interval_s: float) -> None:
    assert bearable_interval_s(scrape_s) == pytest.approx(interval_s)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x1b[2Jb", "a [2Jb"),
        ("a\r\nb", "a b"),
        ("x" * 300, "x" * 199 + "…"),
        ("\u202eabc", "abc"),
    ],
)
def test_text_of_others_is_made_harmless(text: str, shown: str) -> None:
    assert printable(text) == shown
