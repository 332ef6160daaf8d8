"""What is no URL is refused where it is typed, whatever the resolver or the client would make of it."""

from __future__ import annotations

import importlib
from pathlib import Path

import httpx
import pytest

from service.client import client_options
from service.errors import ConfigError
from service.settings import PeerSettings, Settings, load_settings
from service.urls import check_url, check_urls

BAD = (
    "http://a..b",
    "http://.",
    f"http://{'a' * 64}:80",
    "http://xn--a",
    "http://é..b",
    "http://[::1",
    "http://[zz]",
    "http://a:99999",
    "http://a:0",
    "http://a:x",
    "http://:80",
    "http://",
    "ftp://a",
    "a:80",
    "",
)


@pytest.mark.parametrize("url", BAD)
def test_what_no_client_could_reach_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        check_url(url)
    with pytest.raises(ConfigError):
        client_options(PeerSettings(), url, timeout_s=1)


@pytest.mark.parametrize("url", ["http://a", "https://a.b:1", "http://[::1]:80", "http://é.example", "http://a_b.c."])
def test_a_url_is_one(url: str) -> None:
    assert check_url(f" {url}/ ") == url
    assert httpx.URL(url).host


def test_several_are_checked_one_by_one() -> None:
    assert check_urls("http://a, http://b/") == "http://a,http://b"
    with pytest.raises(ValueError, match=r"the host a\.\.b has a part"):
        check_urls("http://b,http://a..b")


COMMANDS = (
    ("sidecar.config:SidecarSettings", ("vllm", "controller"), ("--vllm", "http://a")),
    ("sidecar.doctor:DoctorSettings", ("vllm", "sidecar", "controller"), ("--vllm", "http://a")),
    ("controller.config:ControllerSettings", ("synchronizer_url", "advertise_url"), ()),
    ("controller.control_main:ControlSettings", ("controller",), ()),
    ("controller.switchback_main:SwitchbackSettings", ("controller",), ()),
    ("controller.export.config:ExportSettings", ("controller",), ("--table", "rounds", "--out", "x.csv")),
    ("diloco.agent.config:IslandSettings", ("controller", "synchronizer"), ()),
    ("replay.config:ReplaySettings", ("server",), ("--trace", "x", "--out", "y")),
)


@pytest.mark.parametrize(
    ("where", "option", "rest"), [(where, option, rest) for where, options, rest in COMMANDS for option in options]
)
@pytest.mark.parametrize("url", ["http://a..b", "http://a:99999", "http://xn--a"])
def test_every_command_refuses_a_bad_url_by_the_name_of_its_option(
    where: str, option: str, rest: tuple[str, ...], url: str
) -> None:
    module, _, name = where.partition(":")
    model: type[Settings] = getattr(importlib.import_module(module), name)
    with pytest.raises(ConfigError, match="not a URL") as caught:
        load_settings(model, [*rest, f"--{option.replace('_', '-')}", url])
    assert option in str(caught.value)


def test_a_password_in_a_url_is_not_quoted(tmp_path: Path) -> None:
    model = importlib.import_module("controller.export.config").ExportSettings
    arguments = ["--table", "rounds", "--out", str(tmp_path / "x.csv"), "--journal", "postgresql://me:hush@host/db"]
    with pytest.raises(ConfigError, match="give --controller URL instead") as caught:
        load_settings(model, arguments)
    assert "hush" not in str(caught.value)
