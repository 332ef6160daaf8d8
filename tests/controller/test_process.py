"""The controller as a real process: killed, restarted, out of disk, stopped."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.controller.helpers import progress, report, sample
from tests.controller.processes import DEADLINE_S, controller, eventually

pytestmark = pytest.mark.integration


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    seq = 0
    with controller(tmp_path, "--budget-syncs", "50") as process:
        lease = process.register()
        run_id = lease["run_id"]
        for round_ in range(3):
            process.beat(progress=progress(10, round=round_))
            seq = process.directives(after=seq)["seq"]
            done = report(round_, started_s=time.time(), pushed_s=None, finished_s=time.time() + 1)
            assert process.beat(syncs=[done], progress=progress(0, round=round_ + 1))["syncs_acknowledged"] == 1
        process.http.post("/v1/samples", json={"samples": [sample(t_s=time.time())]}).raise_for_status()
        process.http.put("/v1/policy", json={"name": "fixed_h", "params": {"h": 30}}).raise_for_status()
        process.beat(progress=progress(30, round=3))
        last = process.directives(after=seq)
        rounds = process.http.get("/v1/rounds").json()
        budget = process.http.get("/v1/budget").json()
        decisions = process.http.get("/v1/decisions?limit=10000").json()["decisions"]
        epoch = process.epoch
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(DEADLINE_S)
    assert budget["spent"] == 3
    with controller(tmp_path, "--budget-syncs", "50") as process:
        process.epoch = epoch
        fleet = process.http.get("/v1/fleet").json()
        assert (fleet["run_id"], fleet["epoch"], fleet["rounds_closed"]) == (run_id, epoch, 3)
        assert fleet["islands"][0]["slot"] == 0
        assert fleet["servers"][0]["server_id"] == "vllm-0"
        assert process.http.get("/v1/budget").json() == budget
        assert process.http.get("/v1/rounds").json() == rounds
        assert process.http.get("/v1/policy").json()["params"] == {"h": 30}
        assert process.http.get("/v1/decisions?limit=10000").json()["decisions"][: len(decisions)] == decisions
        assert process.directives(after=seq, wait_s=0)["directives"] == last["directives"]
        done = report(3, started_s=time.time(), pushed_s=None, finished_s=time.time() + 1)
        process.beat(syncs=[done], progress=progress(30, round=4))
        assert process.directives(after=last["seq"])["seq"] > last["seq"]
        assert process.http.get("/v1/budget").json()["spent"] == 4


def test_a_full_disk_is_named_survived_and_made_up_for(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        process.register()
        limit = (tmp_path / "journal.sqlite-wal").stat().st_size
        resource.prlimit(process.child.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        eventually(lambda: process.http.get("/readyz").status_code == 503, "not ready")
        reason = process.http.get("/readyz").json()["reason"]
        assert "journal.sqlite cannot be written" in reason
        refused = process.http.put("/v1/policy", json={"name": "no_sync"})
        assert (refused.status_code, refused.json()["field"]) == (503, "--journal")
        receipt = process.http.post("/v1/samples", json={"samples": [sample(t_s=time.time())]}).json()
        assert receipt["accepted"] == 1
        done = report(0, started_s=time.time(), pushed_s=None, finished_s=time.time() + 1)
        assert process.beat(syncs=[done], progress=progress(5))["syncs_acknowledged"] == 0
        assert process.http.get("/healthz").status_code == 200
        failures = process.http.get("/metrics").text
        assert re.search(r"^wadiloco_controller_journal_errors_total [1-9]", failures, re.MULTILINE)
        resource.prlimit(process.child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        eventually(lambda: process.http.get("/readyz").status_code == 200, "ready again")
        assert process.beat(syncs=[done], progress=progress(5))["syncs_acknowledged"] == 1
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(DEADLINE_S)
    with controller(tmp_path) as process:
        assert process.http.get("/v1/policy").json()["name"] == "no_sync"
        assert len(process.http.get("/v1/rounds").json()["rounds"]) == 1


def test_a_term_signal_ends_it_cleanly_although_a_poll_waits(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        lease = process.register()
        answers: list[dict[str, Any]] = []
        poll = threading.Thread(
            target=lambda: answers.append(process.directives(after=lease["directive_seq"], wait_s=30))
        )
        poll.start()
        process.http.get("/healthz").raise_for_status()
        started_s = time.monotonic()
        process.child.send_signal(signal.SIGTERM)
        assert process.child.wait(DEADLINE_S) == 0
        poll.join(DEADLINE_S)
        assert time.monotonic() - started_s < 10
        assert answers == [{"directives": [], "seq": lease["directive_seq"]}]


def test_a_journal_that_cannot_be_made_ends_the_start_with_one_message(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "journal.sqlite"
    command = [sys.executable, "-m", "wadiloco", "controller", "--port", "0", "--journal", str(missing)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert "wadiloco controller: --journal: cannot use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_disk_that_is_full_at_the_start_ends_it_with_one_message(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    limited = f"ulimit -f 8; exec '{sys.executable}' -m wadiloco controller --port 0 --journal '{journal}'"
    ended = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert "wadiloco controller: --journal: cannot use" in ended.stderr
    assert "has space" in ended.stderr


def test_with_a_file_it_starts_without_torch_numpy_and_what_postgresql_needs() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'sqlalchemy', 'psycopg'): sys.modules[name] = None\n"
        "from wadiloco import main\n"
        "raise SystemExit(main(['controller', '--print-config']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    probe = "import controller.main, sys; print(sorted({'torch', 'numpy', 'sqlalchemy', 'psycopg'} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert ended.stdout.strip() == "[]"


def test_without_the_packages_for_postgresql_the_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['sqlalchemy'] = None\n"
        "from wadiloco import main\n"
        "raise SystemExit(main(['controller', '--journal', 'postgresql://user:hush@127.0.0.1/run']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 3
    assert "pip install 'wadiloco[postgres]'" in ended.stderr
    assert "hush" not in ended.stderr


def test_a_controller_that_is_full_refuses_and_says_that_it_lives(tmp_path: Path) -> None:
    with controller(tmp_path, "--max-connections", "8") as process, contextlib.ExitStack() as opened:
        url = httpx.URL(process.url)
        for _ in range(12):
            opened.enter_context(socket.create_connection((url.host, url.port or 0), timeout=DEADLINE_S))
        with httpx.Client(base_url=process.url, timeout=DEADLINE_S, trust_env=False) as late:
            eventually(lambda: late.get("/v1/fleet", headers={"Connection": "close"}).status_code == 503, "a refusal")
            assert late.get("/healthz").status_code == 200
            assert "wadiloco_controller_connections_limit 8.0" in late.get("/metrics").text
        assert process.http.get("/v1/fleet").status_code == 200
