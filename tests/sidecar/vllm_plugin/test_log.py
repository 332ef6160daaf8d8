"""The plugin's lines in the log of a server: in a process of its own, with loggers as vLLM sets them up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SERVER = """
import logging, logging.config, sys, types
from pathlib import Path
sys.modules["vllm"] = types.ModuleType("vllm")
logging.config.dictConfig({
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"vllm": {"format": "%(levelname)s %(message)s"}},
    "handlers": {"vllm": {"class": "logging.StreamHandler", "formatter": "vllm", "level": "INFO",
                          "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
})
logging.getLogger().setLevel(logging.ERROR)
logging.lastResort = None
"""
GATE = """
from sidecar.vllm_plugin.gate_writer import GateWriter
writer = GateWriter(Path(sys.argv[1]), 1)
writer.beat()
"""
RING = """
from sidecar.vllm_plugin.step_ring import StepRing
ring = StepRing(Path(sys.argv[1]), engine=0)
ring.beat()
"""
RECORDER = """
from sidecar.vllm_plugin.recorder import StepRecorder
class Strange:
    def __getattr__(self, name): raise RuntimeError("strange")
recorder = StepRecorder(None, None)
recorder.record(Strange(), None)
recorder.record(Strange(), None)
"""


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (GATE, "WARNING gate is off, training beside this server will yield"),
        (RING, "WARNING step records are off"),
        (RECORDER, "ERROR a step could not be recorded"),
    ],
)
def test_the_log_of_the_server_has_the_line_once(tmp_path: Path, script: str, line: str) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", SERVER + script, str(tmp_path / "file" / "gate")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout.count(line), done.stderr) == (1, "")
