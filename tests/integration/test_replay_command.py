"""`wadiloco replay` from the outside: a real vLLM server, real islands, and every way to be interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replay.summary import Summary
from tests.integration.helpers import WADILOCO, descendants_of, eventually, is_alive

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(400)]

POLICIES = ("no_sync", "random_deferral", "wa_diloco")
SMALL_MODEL = ("--train-options", "batch_size=2", "--train-options", "context=64")


def command(url: str, out: Path, *options: str) -> list[str]:
    return [
        *(*WADILOCO, "replay", "--server", url, "--out", str(out), "--ports", "18600-18650"),
        *("--islands", "2", "--island-cores", "0,1" if (os.cpu_count() or 1) > 1 else "0", *SMALL_MODEL, *options),
    ]


def start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def summary_of(out: Path) -> tuple[Summary, dict[str, Any]]:
    raw = json.loads((out / "summary.json").read_text())
    return Summary.model_validate(raw), raw


def test_three_policies_on_real_traffic(vllm_url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--duration-s", "30", "--outer-syncs", "4", "--min-gap-s", "2", "--min-h", "4")
    done = subprocess.run(command(vllm_url, out, *options), capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    summary, raw = summary_of(out)
    assert [run.policy for run in summary.runs] == list(POLICIES)
    assert set(raw) >= {"trace", "slo", "budget", "runs", "comparisons", "gap_closed"}
    for run in summary.runs:
        assert run.mode == "live"
        assert run.requests > 0
        assert not run.failed_requests
        assert run.e2e_ms is not None
        assert 0 < run.e2e_ms.p50 <= run.e2e_ms.p95 <= run.e2e_ms.p99
        assert run.inner_steps > 0
        assert run.tokens_trained > 0
        assert run.first_loss is not None
        assert run.final_loss is not None
        assert run.final_loss < run.first_loss
        assert run.outer_syncs == (0 if run.policy == "no_sync" else 4)
        assert (run.sync_busy_s > 0) == (run.policy != "no_sync")
    assert len({run.requests for run in summary.runs}) == 1
    assert {comparison.b for comparison in summary.comparisons} <= {"no_sync", "random_deferral"}
    for policy in POLICIES:
        assert policy in (out / "report.md").read_text()
        assert policy in done.stdout
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    calibrate = [*WADILOCO, "calibrate", "--replay", str(out), "--out", str(tmp_path / "calibration.json"), "--json"]
    counted = json.loads(subprocess.run(calibrate, capture_output=True, text=True, timeout=60, check=True).stdout)
    requests = {phase: sum(bin_["requests"] for bin_ in bins) for phase, bins in counted["phases"].items()}
    # Without a gate the islands train all the time, and sync eight times within a second or so.
    assert requests["inner"] > 10 * requests["none"]
    assert requests["sync"] > 0


def test_interrupt_ends_everything_with_one_message(vllm_url: str, tmp_path: Path) -> None:
    process = start(command(vllm_url, tmp_path / "out", "--duration-s", "120", "--policies", "no_sync"))
    try:
        seen = eventually(lambda: whole_fleet(process.pid), what="fleet")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # an impatient user
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not [pid for pid in seen if is_alive(pid)]


def test_a_failed_child_ends_the_replay_and_names_its_log(vllm_url: str, tmp_path: Path) -> None:
    process = start(command(vllm_url, tmp_path / "out", "--duration-s", "120", "--policies", "no_sync"))
    try:
        seen = eventually(lambda: whole_fleet(process.pid), what="fleet")
        os.kill(controller_of(process.pid), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3
    assert "controller was killed by signal 9" in errors
    assert "controller.log" in errors
    assert "Traceback" not in errors
    assert not [pid for pid in seen if is_alive(pid)]


def whole_fleet(pid: int) -> set[int] | None:
    """Controller, synchronizer, sidecar, two agents and their two workers, once all are there."""
    found = descendants_of(pid)
    return found if len(found) >= 7 else None


def controller_of(pid: int) -> int:
    for child in descendants_of(pid):
        argv = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"controller" in argv:
            return child
    raise AssertionError("no controller")


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--model", "gpt-9"), 2, "tiny"),
        (("--trace", "/nowhere.csv"), 2, "/nowhere.csv"),
        (("--slo", "fast"), 2, "slo"),
        (("--policies", "best"), 2, "policies"),
        (("--train-options", "batch_size=none"), 2, "train_options: batch_size"),
    ],
)
def test_bad_input_is_one_clear_error(
    vllm_url: str, tmp_path: Path, options: tuple[str, ...], code: int, named: str
) -> None:
    argv = command(vllm_url, tmp_path / "out", "--duration-s", "20", *options)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_port_range_is_one_clear_error(vllm_url: str, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        argv = command(vllm_url, tmp_path / "out", "--duration-s", "20", "--ports", f"{port}-{port}")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "ports" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_server_is_one_clear_error(tmp_path: Path) -> None:
    argv = [*WADILOCO, "replay", "--server", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "http://127.0.0.1:9" in done.stderr
    assert "--server" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_directory_that_cannot_be_made_is_named(vllm_url: str) -> None:
    argv = command(vllm_url, Path("/proc/replay"), "--duration-s", "20")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "out: cannot write into /proc/replay" in done.stderr
