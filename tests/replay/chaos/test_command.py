"""``wadiloco chaos`` on a real fleet: one controller, one synchronizer, two islands of a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.agent.vaults import SHARED_MEMORY
from replay.chaos.procfs import descendants, parent_of
from replay.chaos.record import ChaosSummary, Outcome
from replay.chaos.session import REPORT, RESULT
from replay.processes import Children, free_ports
from service.child import module_command, module_environment
from tests.ports import share_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="stops and watches processes as Linux does"),
]

PORTS = share_of(range(21_000, 21_400))
DEADLINE_S = 240.0
MODEL = {"num_layers": "1", "num_heads": "2", "width": "32", "context": "16", "batch_size": "4", "data_shards": "4"}


@contextmanager
def chaos(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    corpus = out.parent / "corpus.txt"
    corpus.write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    train = [part for name, value in MODEL.items() for part in ("--train-options", f"{name}={value}")]
    command = [
        *(*module_command("wadiloco"), "chaos", "--out", str(out), *train, "--train-options", f"data={corpus}"),
        *("--ports", f"{PORTS.start}-{PORTS.stop - 1}", "--spares", "0", "--settle-s", "1", "--sync-every", "100"),
        *options,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | module_environment()
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=DEADLINE_S)


def until(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before {what}"
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.05)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_killed_workers_train_again_and_everything_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = ("--at", "slot=1,step=40,kind=kill,target=worker", "--at", "slot=0,step=60,kind=kill,target=worker")
    with chaos(out, "--json", "--recover-within-s", "120", *plan) as process:
        printed, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, told
    found = ChaosSummary.model_validate_json((out / RESULT).read_text())
    assert found == ChaosSummary.model_validate(json.loads(printed))
    assert (found.planned, found.num_injected, found.num_recovered, found.num_hangs) == (2, 2, 2, 0)
    for fault, (slot, step) in zip(found.faults, [(1, 40), (0, 60)], strict=True):
        assert (fault.kind, fault.slot, fault.outcome) == ("kill", slot, Outcome.RECOVERED)
        assert fault.at_step is not None
        assert fault.at_step >= step
        assert fault.injected_s is not None
        assert fault.detected_s is not None
        assert fault.trains_again_s is not None
        assert fault.injected_s < fault.detected_s <= fault.trains_again_s
        assert 0 <= fault.steps_lost <= fault.at_step
        assert fault.others_gap_s is not None
        assert found.steps[slot] > fault.at_step
    assert len({fault.pid for fault in found.faults}) == 2
    assert 0 < found.goodput_frac <= 1
    assert found.restarts == {"controller": 0, "synchronizer": 0, "agent-0": 0, "agent-1": 0}
    assert found.final_loss is not None
    assert {name.partition(" ")[0] for name in (one.name for one in found.memory)} == set(found.restarts)
    assert "Everything recovered." in (out / REPORT).read_text()


def test_what_is_not_over_in_time_is_a_hang_and_fails(tmp_path: Path) -> None:
    freeze = "kind=freeze,target=worker"  # only a timeout ends it
    options = ("--recover-within-s", "0.2", "--at", f"slot=1,step=5,{freeze}", "--at", f"slot=0,step=5,{freeze}")
    with chaos(tmp_path / "out", *options) as process:
        printed, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, told
    assert "Not everything recovered" in printed
    found = ChaosSummary.model_validate_json((tmp_path / "out" / RESULT).read_text())
    # The fleet is not what it was: the second fault would say nothing of itself.
    assert [fault.outcome for fault in found.faults] == [Outcome.HANG]
    assert found.interrupted


@pytest.mark.parametrize("how", ["interrupted", "crashed"])
def test_nothing_is_left_behind_whatever_ends_it(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    with chaos(out, "--at", "slot=0,step=5,kind=freeze,target=worker") as process:
        until(lambda: any(state_of(pid) == "T" for pid in descendants(process.pid)), process, "a frozen worker")
        started = descendants(process.pid)
        assert len(started) >= 6, "itself, controller, synchronizer, two agents and their workers"
        if how == "interrupted":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(started[0], signal.SIGKILL)
            assert parent_of(process.pid) == os.getpid()
        _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (130 if how == "interrupted" else 128 + signal.SIGKILL), told
    assert [pid for pid in started if parent_of(pid) is not None] == []
    assert not any((SHARED_MEMORY / f"wadiloco-chaos-{pid}").exists() for pid in started)
    if how == "interrupted":
        assert "stopping: ending the processes of this run" in told
        assert ChaosSummary.model_validate_json((out / RESULT).read_text()).interrupted


def test_a_fleet_that_runs_already_is_broken_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    ports = free_ports(3, PORTS)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    model = [part for name, value in MODEL.items() for part in (f"--{name.replace('_', '-')}", value)]
    commands = {
        "controller": [
            *("--journal", str(tmp_path / "journal.sqlite"), "--num-slots", "1", "--policy", "no_sync"),
            *("--synchronizer-url", urls[1]),
        ],
        "synchronizer": ["--directory", str(tmp_path / "state")],
        "island": ["--controller", urls[0], "--no-idle-priority", "--data", str(tmp_path / "corpus.txt"), *model],
    }
    children = Children()
    try:
        for port, (name, options) in zip(ports, commands.items(), strict=True):
            command = [*module_command("wadiloco"), name, "--port", str(port), *options]
            children.start(name, command, log=tmp_path / f"{name}.log", env=module_environment())
        given = [{"url": url, "pid": child.process.pid} for url, child in zip(urls, children.running, strict=True)]
        fleet = tmp_path / "fleet.json"
        fleet.write_text(json.dumps({"controller": given[0], "synchronizer": given[1], "agents": given[2:]}))
        out = tmp_path / "out"
        with chaos(out, "--fleet", str(fleet), "--recover-within-s", "120", "--at", "slot=0,step=20") as process:
            _, told = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, told
        children.check()
        found = ChaosSummary.model_validate_json((out / RESULT).read_text())
        assert [(fault.target, fault.outcome) for fault in found.faults] == [("worker 0/0", Outcome.RECOVERED)]
        assert found.faults[0].others_gap_s is None
    finally:
        children.stop()


def test_a_directory_with_results_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RESULT).write_text("{}")
    with chaos(tmp_path / "out") as process:
        _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 4
    assert "out: " in told
    assert "already holds a chaos run" in told
