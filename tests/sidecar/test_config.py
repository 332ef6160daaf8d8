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
        (["--vllm", "http://256.1.1.1"], "vllm", "Invalid IPv4 address.*http://HOST:PORT"),
        (["--vllm", "http://u:p@host"], "vllm", "no user"),
        (["--vllm", VLLM + "/metrics"], "vllm", "without /metrics"),
        (["--vllm", "unix:vllm.sock"], "vllm", "unix:/run/vllm.sock"),
        (["--vllm", "unix://host/vllm.sock"], "vllm", "unix:/run/vllm.sock"),
        (["--vllm", "unix:/" + "x" * 107], "vllm", "shorter --uds"),
        (["--vllm", "https://h", "--vllm-ca", "/nowhere"], "vllm_ca", "not point to a file"),
        (["--vllm", VLLM, "--metric-replica", ""], "metric_replica", "at least 1"),
        (["--vllm", VLLM, "--controller", "nowhere"], "controller", "http://HOST:PORT"),
        (["--vllm", VLLM, "--slo", "e2e:200"], "slo", "unit is missing"),
        (["--vllm", VLLM, "--slo", "e2e:2s,e2e:3s"], "slo", "e2e is there twice"),
        (["--vllm", VLLM, "--slo", "e2e:2s@100%"], "slo", "no error budget"),
        (["--vllm", VLLM, "--scrape-interval-s", "0.05"], "scrape_interval_s", "0.1"),
        (["--vllm", VLLM, "--busy-requests", "0"], "busy_requests", "1"),
        (["--vllm", VLLM, "--server-id", "a b"], "server_id", "pattern"),
        (["--vllm", VLLM, "--metric-prefix", ""], "metric_prefix", "pattern"),
        (["--vllm", VLLM, "--state-file", "/nowhere/at/all"], "state_file", "existing folder"),
        (["--vllm", VLLM, "--state-file", "x" * 300], "state_file", "File name too long"),
        (["--vllm", VLLM, "--state-file", "/dev/zero"], "state_file", "not a regular file"),
    ],
)
def test_what_cannot_work_is_named(arguments: list[str], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(*arguments)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vllm": "https://h", "vllm_cert": __file__}, "vllm_cert and vllm_key go together"),
        ({"vllm": "https://h", "vllm_key": __file__}, "vllm_cert and vllm_key go together"),
        ({"vllm": VLLM, "vllm_ca": __file__}, "https URL"),
        ({"vllm": "unix:/run/v.sock", "vllm_ca": __file__}, "https URL"),
        ({"vllm_token": "a", "vllm_token_file": __file__}, "leave one out"),
        ({"scrape_interval_s": "2", "scrape_interval_max_s": "1"}, "scrape_interval_max_s 1 is under"),
    ],
)
def test_settings_that_do_not_go_together_are_named(values: dict[str, str], message: str) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in ({"vllm": VLLM} | values).items()]
    with pytest.raises(ConfigError, match=message):
        load(*arguments)


@pytest.mark.parametrize("token", ["two words", "line\nfeed", "ünicode", " "])
def test_a_token_that_no_header_can_hold_is_refused_and_not_quoted(token: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as refused:
        load("--vllm", VLLM, "--vllm-token", token)
    assert not token.strip() or token not in str(refused.value)


def test_a_unix_socket_is_an_address() -> None:
    settings = load("--vllm", "unix:///run/vllm.sock")
    assert (settings.vllm, settings.vllm_socket) == ("unix:/run/vllm.sock", "/run/vllm.sock")
    assert settings.server_id.endswith(":/run/vllm.sock")
    assert load("--vllm", VLLM).vllm_socket is None


def test_a_token_is_printed_nowhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WADILOCO_SIDECAR_VLLM_TOKEN", "hush-hush")
    with pytest.raises(SystemExit):
        main(["--vllm", VLLM, "--print-config"])
    printed = capsys.readouterr()
    assert '"vllm_token": "**********"' in printed.out
    assert "hush-hush" not in printed.out + printed.err + repr(load("--vllm", VLLM))


def test_a_slow_server_is_scraped_five_times_as_seldom_at_most() -> None:
    assert load("--vllm", VLLM, "--scrape-interval-s", "2").scrape_longest_s == 10
    assert load("--vllm", VLLM, "--scrape-interval-max-s", "3").scrape_longest_s == 3


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
