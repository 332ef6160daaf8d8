"""``wadiloco control`` against a running controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wadiloco
from controller.control_main import _split_action
from tests.controller.helpers import progress
from tests.controller.processes import controller

pytestmark = pytest.mark.usefixtures("root_logging")


@pytest.mark.integration
def test_orders_are_given_planned_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with controller(tmp_path, "--policy-params", "h=90") as process:
        process.register()
        process.beat(progress=progress(5))
        where = ["--controller", str(process.http.base_url)]
        assert wadiloco.main(["control", *where, "drain", "--slot", "0", "--dry-run", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["dry_run"], answer["steps"][0]["agent_id"]) == (True, "island-0")
        assert wadiloco.main(["control", "pause", *where]) == 0
        assert capsys.readouterr().out == "training pauses, no syncs\n"
        assert process.http.get("/v1/fleet").json()["paused"]
        assert wadiloco.main(["control", "sync-now", *where]) == 4
        assert capsys.readouterr().err == "wadiloco control: action: cannot sync: paused (resume the run first)\n"
        assert wadiloco.main(["control", "resume", "--dry-run", *where]) == 0
        assert capsys.readouterr().out == "would be: training and syncs go on\n"
        assert process.http.get("/v1/fleet").json()["paused"]
        assert wadiloco.main(["control", "swap", *where, "--slot", "0", "--when", "now"]) == 4
        assert "spares wait (start another agent" in capsys.readouterr().err
        assert wadiloco.main(["control", "drain", *where, "--agent-id", "nobody"]) == 2
        assert "agent_id: there is no agent nobody (see GET /v1/islands)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "ACTION: no order is given (one of pause, resume, sync-now, drain, swap)"),
        (["dance"], 2, "ACTION: no such order: dance"),
        (["drain", "--slot", "0", "--node", "a"], 2, "give one of them"),
        (["pause", "--controller", "http://127.0.0.1:1"], 3, "controller: no answer from http://127.0.0.1:1: "),
    ],
)
def test_what_cannot_work_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wadiloco.main(["control", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "action", "rest"),
    [
        (["drain", "--slot", "0"], "drain", ["--slot", "0"]),
        (["--slot", "0", "drain"], "drain", ["--slot", "0"]),
        (["--dry-run", "swap", "--slot=1"], "swap", ["--dry-run", "--slot=1"]),
        (["--agent-id", "pause", "drain"], "drain", ["--agent-id", "pause"]),
        (["--help"], None, ["--help"]),
    ],
)
def test_the_order_may_stand_anywhere(arguments: list[str], action: str | None, rest: list[str]) -> None:
    assert _split_action(arguments) == (action, rest)
