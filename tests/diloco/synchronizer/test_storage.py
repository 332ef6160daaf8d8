"""The state directory: nothing in it is waited for, and what was half written goes at the next start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.synchronizer.generation import newest_generation, path_of
from diloco.synchronizer.storage import owned, write_durably
from service.errors import ConfigError, InputError


def test_a_pipe_for_the_lock_is_refused_by_field(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ConfigError, match="not a regular file") as caught, owned(tmp_path):
        pass
    assert caught.value.field == "directory"


def test_a_pipe_for_a_generation_is_a_damaged_one(tmp_path: Path) -> None:
    os.mkfifo(path_of(tmp_path, 1))
    with pytest.raises(InputError, match="all 1 generations"):
        newest_generation(tmp_path)


def test_what_was_half_written_goes_at_the_next_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "planted.part")
    (tmp_path / ".generation-1.safetensors.00.part").touch()
    with owned(tmp_path):
        write_durably(tmp_path / "kept", [b"a", memoryview(b"b")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "lock"]
    assert (tmp_path / "kept").read_bytes() == b"ab"
