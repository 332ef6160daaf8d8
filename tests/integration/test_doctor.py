"""``wadiloco doctor`` on a real vLLM server."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.integration.helpers import WADILOCO

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(600)]


def test_a_real_server_is_well(vllm_url: str) -> None:
    command = [*WADILOCO, "doctor", "--vllm", vllm_url, "--slo", "e2e:300ms", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    for check in ("reachable", "version", "signals", "slo", "scrape", "engine", "processes", "host", "clock"):
        assert found[check]["status"] == "ok", found[check]
    assert found["signals"]["details"]["missing"] == []
    assert found["slo"]["details"] == {"below_s": 0.3, "above_s": 0.3}
    assert found["processes"]["details"] == {"engines": 1, "multiprocess": False}
