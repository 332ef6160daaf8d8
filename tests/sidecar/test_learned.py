"""The state file: whole or not at all, and never a reason not to start."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from sidecar.config import SidecarSettings
from sidecar.learned import MAX_FILE_BYTES, LearnedState, read_learned, write_learned
from sidecar.observer import Observer
from tests.sidecar.helpers import capture, edited, good, parse


def make_observer(vllm: str = "http://127.0.0.1:8000") -> Observer:
    return Observer(SidecarSettings(vllm=vllm, node="host", slo="e2e:300ms"), t_s=0.0, monotonic_s=0.0)


def taught() -> Observer:
    observer = make_observer()
    observer.observe(good(parse(capture("busy"), t_s=1.0)))
    observer.observe(good(parse(capture("busy-1s-later"), t_s=2.0)))
    return observer


def test_what_was_learned_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    before = taught()
    write_learned(path, before.export(t_s=100.0))
    learned = read_learned(path)
    assert learned is not None
    after = make_observer()
    after.restore(learned, t_s=103.0)
    assert after.num_observations == before.num_observations == 1
    assert after.calibrator.export() == before.calibrator.export()
    page = edited(capture("idle"), {"vllm:num_requests_running": 0})
    sample = after.observe(good(parse(page, t_s=5.0)))
    assert sample.forecast[0].arrivals_per_s == pytest.approx(12.0)


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_learned(path, taught().export(t_s=1.0))
    write_learned(path, taught().export(t_s=2.0))
    learned = read_learned(path)
    assert learned is not None
    assert learned.t_s == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_written_raises_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_learned(path, taught().export(t_s=1.0))
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_learned(path, taught().export(t_s=2.0))
    learned = read_learned(path)
    assert learned is not None
    assert learned.t_s == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_first_start_has_no_file_and_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read_learned(tmp_path / "state.json") is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"null", b"{}", b'{"format": "wadiloco-sidecar-0"}', b"[" * 100_000, b'{"t_s": NaN}'],
)
def test_a_file_that_is_no_state_is_a_loud_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert read_learned(path) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"cold start: {path}")


def test_a_cut_file_is_a_loud_cold_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    write_learned(path, taught().export(t_s=1.0))
    path.write_bytes(path.read_bytes()[:-100])
    assert read_learned(path) is None
    assert "cold start" in caplog.text


def test_a_huge_file_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert read_learned(path) is None
    assert "cold start" in caplog.text


def test_a_state_of_another_server_or_cadence_is_refused_whole() -> None:
    learned = taught().export(t_s=1.0)
    other = make_observer("http://127.0.0.1:8001")
    with pytest.raises(ValueError, match=r"server 127\.0\.0\.1:8000"):
        other.restore(learned, t_s=2.0)
    slower = learned.model_copy(update={"bursts": learned.bursts.model_copy(update={"tick_s": 5.0})})
    fresh = make_observer()
    with pytest.raises(ValueError, match="tick_s"):
        fresh.restore(LearnedState.model_validate(slower.model_dump()), t_s=2.0)
    assert fresh.num_observations == 0
