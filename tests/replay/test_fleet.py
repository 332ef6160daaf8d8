"""What a fleet refuses before it starts anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replay.fleet import as_arguments, check_train_options
from replay.traces import read_trace
from service.errors import ConfigError, InputError


def test_options_become_arguments() -> None:
    assert as_arguments((("batch_size", "4"), ("lr", "0.1"))) == ["--batch-size", "4", "--lr", "0.1"]


def test_good_train_options_pass() -> None:
    check_train_options((("batch_size", "4"), ("context", "64")))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batch_size", "none", "batch_size"),
        ("foo", "1", "--foo"),
        ("num_layers", "0", "num_layers"),
        ("controller", "http://x", "set by the replay"),
        ("port", "99", "set by the replay"),
    ],
)
def test_bad_train_options_are_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_train_options(((name, value),))
    assert caught.value.field == "train_options"
    assert str(caught.value).count("(") == 1, "one remedy"
    assert "WADILOCO_" not in str(caught.value)


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="not a regular file"):
        read_trace(pipe)
