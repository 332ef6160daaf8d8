"""Two authorities, one that the test trusts and another; and the doctor's command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wadiloco
from tests.sidecar.authority import Authority

FAST = ("--watch-s", "0.5", "--timeout-s", "2")
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "stranger")


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command; the findings by check, and the exit code as ``code``."""

    def run(url: str, *options: object) -> dict[str, Any]:
        gate = ("--gate", str(tmp_path / "gate")) if "--gate" not in options else ()
        code = wadiloco.main(["doctor", "--vllm", url, "--json", *FAST, *gate, *map(str, options)])
        document = json.loads(capsys.readouterr().out)
        return {"code": code, "status": document["status"], **{f["check"]: f for f in document["findings"]}}

    return run
