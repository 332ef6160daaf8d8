"""Experiments on the controller as a real process: killed in the middle, driven and interrupted from the command."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.controller.helpers import progress, sample
from tests.controller.processes import DEADLINE_S, Process, controller, eventually

pytestmark = pytest.mark.integration

PLAN = {"a": {"name": "pressure_gate"}, "b": {"name": "no_sync"}, "washout_s": 0.5, "syncs_per_block": 1}
LONG = ("--blocks", "4", "--block-s", "600")


@contextmanager
def served(process: Process) -> Iterator[None]:
    """A server whose sidecar tells ten requests each tenth of a second, one of them too slow, and its island."""
    process.register()
    done = threading.Event()

    def tell() -> None:
        step = 1000
        while not done.wait(0.1):
            step += 1
            told: dict[str, Any] = {"interval_s": 0.1, "slo_requests": 10, "slo_violations": 1}
            with contextlib.suppress(Exception):  # The controller is killed while this goes on.
                process.http.post("/v1/samples", json={"samples": [sample(t_s=time.time(), **told)]})
                process.beat(progress=progress(1, step=step, step_time_s=None))

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(DEADLINE_S)


def experiment(process: Process, number: int = 1) -> dict[str, Any]:
    return dict(process.http.get(f"/v1/experiments/{number}").raise_for_status().json())


def switchback(process: Process, *options: str) -> list[str]:
    url = str(process.http.base_url)
    return [sys.executable, "-m", "wadiloco", "switchback", "--controller", url, "--poll-s", "0.1", *options]


def test_a_kill_in_the_middle_ends_neither_the_experiment_nor_what_it_owes(tmp_path: Path) -> None:
    with controller(tmp_path) as process, served(process):
        before = process.http.get("/v1/policy").json()
        started = process.http.post("/v1/experiments", json=PLAN | {"blocks": 4, "block_s": 2.5})
        assert started.status_code == 201, started.text
        eventually(lambda: len(experiment(process)["blocks"]) == 2, "the second block")
        eventually(lambda: experiment(process)["blocks"][0]["requests"] > 0, "requests")
        first = experiment(process)["blocks"][0]
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(DEADLINE_S)
    with controller(tmp_path) as process, served(process):
        status = experiment(process)
        assert status["state"] == "running"
        assert status["blocks"][0]["started_s"] == first["started_s"]
        assert status["blocks"][0]["requests"] >= first["requests"]
        assert status["policy_after"] == before
        refused = process.http.put("/v1/policy", json={"name": "no_sync"})
        assert refused.status_code == 409
        eventually(lambda: experiment(process)["state"] == "done", "the end")
        status = experiment(process)
        assert [(block["index"], block["requests"] > 0) for block in status["blocks"]] == [
            (0, True),
            (1, True),
            (2, True),
            (3, True),
        ]
        assert status["result"]["pairs"] == 2
        assert 0.05 < status["result"]["rate_a"] < 0.15
        assert process.http.get("/v1/policy").json() == before


def test_the_command_runs_an_experiment_to_its_end_and_prints_it(tmp_path: Path) -> None:
    with controller(tmp_path) as process, served(process):
        plan = (
            "--policy-a",
            "fixed_h:h=5",
            "--policy-b",
            "no_sync",
            "--blocks",
            "2",
            "--block-s",
            "1",
            "--washout-s",
            "0",
        )
        ended = subprocess.run(
            switchback(process, *plan, "--json"), capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr
        status = json.loads(ended.stdout)
        assert (status["state"], status["result"]["pairs"], status["spec"]["a"]["params"]) == ("done", 1, {"h": 5})
        assert "block 1/2" in ended.stderr
        assert "syncs a 0/" in ended.stderr
        again = subprocess.run(
            switchback(process, "--attach", "1"), capture_output=True, text=True, timeout=60, check=False
        )
        assert again.returncode == 0, again.stderr
        assert "fixed_h:h=5" in again.stdout
        assert "1 pairs count, 0 left out: too few pairs" in again.stdout
        assert "policy now: fixed_h:h=10" in again.stdout


@contextmanager
def following(process: Process, *, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """The command, once it follows the first block of a long experiment; it does not outlive the test."""
    with subprocess.Popen(
        switchback(process, *LONG), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        try:
            assert command.stdout is not None
            assert "block 1/4" in command.stdout.readline()
            yield command
        finally:
            command.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_without_a_terminal_stops_the_experiment_and_says_so(
    tmp_path: Path, number: signal.Signals
) -> None:
    with controller(tmp_path) as process, following(process) as command:
        command.send_signal(number)
        _, stderr = command.communicate(timeout=DEADLINE_S)
        assert command.returncode == 130
        assert "experiment 1 is stopped, policy fixed_h:h=10 and its budget are back" in stderr
        assert "Traceback" not in stderr
        assert experiment(process)["state"] == "stopped"
        assert process.http.get("/v1/policy").json()["name"] == "fixed_h"


@pytest.mark.parametrize(("answer", "state"), [(b"n\n", "running"), (b"\n", "stopped")])
def test_an_interrupt_at_a_terminal_asks_first(tmp_path: Path, answer: bytes, state: str) -> None:
    with controller(tmp_path) as process:
        terminal, stdin = pty.openpty()
        try:
            with following(process, stdin=stdin) as command:
                command.send_signal(signal.SIGINT)
                os.write(terminal, answer)
                _, stderr = command.communicate(timeout=DEADLINE_S)
        finally:
            os.close(terminal)
            os.close(stdin)
        assert command.returncode == 130
        assert "stop experiment 1, and put policy fixed_h:h=10 back? [Y/n]" in stderr
        assert ("follow it with --attach 1" in stderr) is (state == "running")
        assert experiment(process)["state"] == state


def test_an_interrupt_while_the_controller_is_away_says_what_goes_on(tmp_path: Path) -> None:
    with controller(tmp_path) as process, following(process) as command:
        assert command.stdout is not None
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(DEADLINE_S)
        assert "the controller is away" in command.stdout.readline()
        command.send_signal(signal.SIGINT)
        _, stderr = command.communicate(timeout=DEADLINE_S)
        assert command.returncode == 130
        assert "it could not be stopped" in stderr
        assert "experiment 1 goes on at http" in stderr


def test_what_the_controller_refuses_is_one_line_with_field_and_remedy(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        for options, code, text in [
            (("--blocks", "5"), 2, "wadiloco switchback: blocks: 5 blocks do not go in pairs (take 6 blocks)"),
            (("--policy-a", "dance"), 2, "wadiloco switchback: policy_a: no such policy: dance"),
            (("--policy-a", "fixed_h:h"), 2, "wadiloco switchback: policy_a: 'h' of 'fixed_h:h' is not PARAM=VALUE"),
            (("--attach", "7"), 2, "wadiloco switchback: attach: there is no experiment 7 (see GET"),
        ]:
            ended = subprocess.run(
                switchback(process, *options), capture_output=True, text=True, timeout=60, check=False
            )
            assert ended.returncode == code
            assert ended.stderr.startswith(text)
            assert ended.stderr.count("\n") == 1
        process.http.post("/v1/experiments", json=PLAN | {"blocks": 2, "block_s": 600}).raise_for_status()
        ended = subprocess.run(switchback(process), capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 4
        assert "experiment 1 is running (wait for its end, or stop it" in ended.stderr


def test_without_a_controller_the_command_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "wadiloco", "switchback", "--controller", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert ended.stderr.startswith("wadiloco switchback: --controller: no answer from http://127.0.0.1:9")
    assert "Traceback" not in ended.stderr
