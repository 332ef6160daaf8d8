"""Settings: what is derived, and one clear error for each value that cannot work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.errors import ConfigError
from service.settings import load_settings
from sidecar.config import SidecarSettings, derive_server_id
from sidecar.main import main

VLLM = "http://127.0.0.1:8000"


def load(*arguments: str) -> SidecarSettings:
    return load_settings(SidecarSettings, arguments)


def test_only_the_server_is_needed() -> None:
    settings = load("--vllm", VLLM + "/")
    assert (settings.vllm, settings.server_id, settings.port, settings.controller) == (
        VLLM,
        "127.0.0.1:8000",
        9400,
        None,
    )
    assert settings.node


def test_a_given_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--vllm", VLLM, "--server-id", "gpu-7").server_id == "gpu-7"
    monkeypatch.setenv("WADILOCO_SIDECAR_SERVER_ID", "gpu-8")
    assert load("--vllm", VLLM).server_id == "gpu-8"


def test_the_objective_is_parsed() -> None:
    assert str(load("--vllm", VLLM, "--slo", "ttft:0.5s,E2E:2s@99.9%").objective) == "ttft:500ms,e2e:2000ms@99.9%"


@pytest.mark.parametrize(
    ("url", "server_id"),
    [
        ("http://gpu-1:8000/base", "gpu-1:8000"),
        ("https://gpu-1", "gpu-1:443"),
        ("http://[::1]:8000", "host::1:8000"),
        ("http://GPU_1:80", "gpu_1:80"),
    ],
)
def test_the_server_is_named_by_its_address(url: str, server_id: str) -> None:
    assert derive_server_id(url) == server_id


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ([], "vllm", "required"),
        (["--vllm", "localhost:8000"], "vllm", "http://HOST:PORT"),
        (["--vllm", "ftp://host"], "vllm", "http://HOST:PORT"),
        (["--vllm", "http://host:99999"], "vllm", "http://HOST:PORT"),
        (["--vllm", "http://u:p@host"], "vllm", "no user"),
        (["--vllm", VLLM + "/metrics"], "vllm", "without /metrics"),
        (["--vllm", VLLM, "--controller", "nowhere"], "controller", "http://HOST:PORT"),
        (["--vllm", VLLM, "--slo", "e2e:200"], "slo", "unit is missing"),
        (["--vllm", VLLM, "--slo", "e2e:2s,e2e:3s"], "slo", "e2e is there twice"),
        (["--vllm", VLLM, "--slo", "e2e:2s@100%"], "slo", "no error budget"),
        (["--vllm", VLLM, "--scrape-interval-s", "0.05"], "scrape_interval_s", "0.1"),
        (["--vllm", VLLM, "--busy-requests", "0"], "busy_requests", "1"),
        (["--vllm", VLLM, "--server-id", "a b"], "server_id", "pattern"),
        (["--vllm", VLLM, "--metric-prefix", ""], "metric_prefix", "pattern"),
        (["--vllm", VLLM, "--state-file", "/nowhere/at/all"], "state_file", "existing folder"),
    ],
)
def test_what_cannot_work_is_named(arguments: list[str], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(*arguments)
    assert refused.value.field == field


def test_a_timeout_far_over_the_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower scrape_timeout_s"):
        load("--vllm", VLLM, "--scrape-interval-s", "0.1", "--scrape-timeout-s", "5")


def test_the_entry_point_prints_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--vllm", VLLM, "--print-config"])
    assert ended.value.code == 0
    assert '"server_id": "127.0.0.1:8000"' in capsys.readouterr().out


def test_a_sidecar_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, sidecar.main; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
