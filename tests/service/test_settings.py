"""Precedence, refusals and error texts of settings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from service.errors import ConfigError
from service.settings import ServiceSettings, is_loopback, load_settings


class ProbeSettings(ServiceSettings):
    """A probe."""

    service: ClassVar[str] = "probe"
    port: int = Field(default=1000, ge=0, le=65535)
    """Port."""
    name: str
    """Required."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Pairs."""


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "probe.toml"
    file.write_text('name = "file"\n')
    assert load_settings(ProbeSettings, ["--config", str(file)]).port == 1000
    file.write_text('name = "file"\nport = 1001\n')
    assert load_settings(ProbeSettings, ["--config", str(file)]).port == 1001
    monkeypatch.setenv("WADILOCO_PROBE_PORT", "1002")
    assert load_settings(ProbeSettings, ["--config", str(file)]).port == 1002
    assert load_settings(ProbeSettings, [f"--config={file}", "--port", "1003"]).port == 1003


def test_construction_in_code_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "7")
    monkeypatch.setenv("WADILOCO_PROBE_PORT", "8")
    assert ProbeSettings(name="x").port == 1000


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "name"),
        (["--name", "x", "--port", "65536"], "port"),
        (["--name", "x", "--port", "many"], "port"),
        (["--name", "x", "--prt", "1"], "--prt"),
        (["--name", "x", "--host", "0.0.0.0"], "token"),  # noqa: S104
        (["--name", "x", "--tls-cert", __file__], "tls_key"),
        (["--name", "x", "--token", " "], "token"),
        (["--name", "x", "--log-level", "loud"], "log_level"),
        (["--config", "/nowhere.toml"], "--config"),
        (["--config"], "--config"),
    ],
)
def test_bad_arguments_are_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(ProbeSettings, argv)
    assert named in str(caught.value)


def test_unknown_keys_are_refused_wherever_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "probe.toml"
    file.write_text('name = "x"\nprot = 1\n')
    with pytest.raises(ConfigError, match=r"^prot: no such setting in .*probe\.toml \(see wadiloco probe --help"):
        load_settings(ProbeSettings, ["--config", str(file)])
    monkeypatch.setenv("WADILOCO_PROBE_PROT", "1")
    with pytest.raises(ConfigError, match="WADILOCO_PROBE_PROT"):
        load_settings(ProbeSettings, ["--name", "x"])


def test_broken_toml_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "probe.toml"
    file.write_text("name = \n")
    with pytest.raises(ConfigError, match=r"probe\.toml is not valid TOML"):
        load_settings(ProbeSettings, ["--config", str(file)])


def test_a_config_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "probe.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"probe\.toml is not valid TOML"):
        load_settings(ProbeSettings, ["--config", str(file)])


def test_print_config_masks_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(ProbeSettings, ["--name", "x", "--token", "hidden-secret", "--print-config"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert '"name": "x"' in printed
    assert "hidden-secret" not in printed


def test_pairs_are_read_from_repeated_options() -> None:
    settings = load_settings(ProbeSettings, ["--name", "x", "--weights", "a=1", "--weights", "b=0.5"])
    assert settings.weights == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],  # noqa: S104
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_secret_of_the_wrong_type_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "probe.toml"
    file.write_text("token = 31415926")
    with pytest.raises(ConfigError, match="token") as refused:
        load_settings(ProbeSettings, ["--config", str(file)])
    assert "31415926" not in str(refused.value)
