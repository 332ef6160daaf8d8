"""A sidecar begins with a calibration that fits it, and refuses any other by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import wadiloco
from service.errors import InputError, UnavailableError
from sidecar.app import create_app
from sidecar.calibration_file import CalibrationFile, read_calibration, write_calibration
from sidecar.calibrator import Calibrator, Phase
from sidecar.config import SidecarSettings
from sidecar.learned import MAX_FILE_BYTES, LearnedState, objective_text
from sidecar.observer import Observer
from sidecar.slo import parse_slo

pytestmark = pytest.mark.usefixtures("root_logging")

SLO = parse_slo("e2e:300ms")


def content(*, violations: int = 50) -> CalibrationFile:
    calibrator = Calibrator()
    calibrator.observe(load=4, phase=Phase.NONE, requests=1000, violations=violations)
    return CalibrationFile(made_at_s=1.0, slo=objective_text(SLO), sources=(), calibration=calibrator.export())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    write_calibration(path, content())
    return path


def test_what_was_written_is_read(path: Path) -> None:
    assert read_calibration(path, SLO) == content()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_written_leaves_what_is_there(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnavailableError, match=r"out: cannot write .*not a regular file"):
        write_calibration(pipe, content(violations=1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("special", ["pipe", "device", "folder", "endless"])
def test_a_special_file_is_no_calibration(path: Path, special: str) -> None:
    path.unlink()
    match special:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            with path.open("wb") as file:
                file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match=r"calibration: .*calibration\.json cannot be read: .* \(make it with"):
        read_calibration(path, SLO)


def test_another_objective_is_refused_with_both_remedies(path: Path) -> None:
    with pytest.raises(InputError, match=r"about e2e:300ms, this sidecar about e2e:200ms \(set --slo e2e:300ms, or"):
        read_calibration(path, parse_slo("e2e:200ms"))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**content().model_dump(mode="json"), "format": "wadiloco-calibration-9"}).encode(),
        json.dumps({**content().model_dump(mode="json"), "more": 1}).encode(),
        content().model_dump_json().replace("50.0", "5000.0").encode(),
        content().model_dump_json().replace('"edges":[1.0,', '"edges":[').encode(),
    ],
)
def test_a_file_that_is_no_calibration_ends_the_start(
    path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(damage)
    argv = ["sidecar", "--vllm", "http://127.0.0.1:9", "--slo", "e2e:300ms", "--calibration", str(path)]
    assert wadiloco.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wadiloco sidecar: calibration: {path}")
    assert error.endswith("(make it with wadiloco calibrate)\n")


def settings_with(path: Path | None) -> SidecarSettings:
    return SidecarSettings(vllm="http://127.0.0.1:8000", slo=str(SLO), calibration=path)


def learned(*, requests: int, slo: str | None = objective_text(SLO)) -> LearnedState:
    observer = Observer(settings_with(None), t_s=0.0, monotonic_s=0.0)
    observer.calibrator.observe(load=4, phase=Phase.NONE, requests=requests, violations=0)
    return observer.export(t_s=1.0).model_copy(update={"slo": slo})


@pytest.mark.parametrize(
    ("state", "requests"),
    [
        (learned(requests=7), 7),
        (learned(requests=7, slo=None), 7),
        (learned(requests=0), 1000),
        (learned(requests=7, slo="ttft:1s"), 1000),
    ],
)
def test_what_a_sidecar_learned_itself_counts_before_what_it_was_given(
    path: Path, state: LearnedState, requests: float
) -> None:
    observer: Observer = create_app(settings_with(path)).state.sidecar.observer
    assert observer.calibrator.num_requests(Phase.NONE) == 1000
    observer.restore(state, t_s=2.0)
    assert observer.calibrator.num_requests(Phase.NONE) == pytest.approx(requests)
