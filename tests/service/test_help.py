"""The options of a command, as ``--help`` shows them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, SecretStr

from service.settings import Settings, load_settings


class Gait(StrEnum):
    SLOW_WALK = "slow_walk"
    RUN = "run"


class ShownSettings(Settings):
    """A probe."""

    service: ClassVar[str] = "shown"
    name: str
    """Name."""
    key: SecretStr | None = None
    """Key."""
    files: tuple[Path, ...] = ()
    """Files."""
    modes: tuple[str, ...] = ("slow", "fast")
    """Modes."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights."""
    place: str = Field(default_factory=lambda: "here")
    """Place."""
    share: str = "5%"
    """Share."""
    limit: int | None = None
    """Limit (default: half of all)."""
    gait: Gait | None = Gait.SLOW_WALK
    """Gait."""
    pace: Literal["a", "b"] = "a"
    """Pace."""
    polite: bool = True
    """Push ahead."""


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        load_settings(ShownSettings, ["--help"])
    assert caught.value.code == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out.partition("options:")[2]) + " "


@pytest.mark.parametrize(
    "line",
    [
        "--config PATH TOML file",
        "--print-config Print",
        "--name TEXT Name. (required)",
        "--key SECRET Key. --",
        "--files PATH,... Files. --",
        "--modes TEXT,... Modes. (default: slow,fast)",
        "--weights NAME=VALUE Weights. --",
        "--place TEXT Place. (default: here)",
        "--share TEXT Share. (default: 5%)",
        "--limit N Limit (default: half of all). --",
        "--gait {slow_walk,run} Gait. (default: slow_walk)",
        "--pace {a,b} Pace. (default: a)",
        "--no-polite Push ahead. ",
    ],
)
def test_an_option_is_shown_in_words(shown: str, line: str) -> None:
    assert line in shown


def test_a_list_is_given_as_its_default_is_shown() -> None:
    assert load_settings(ShownSettings, ["--name", "x", "--modes", "a,b"]).modes == ("a", "b")
