"""The state directory: nothing in it is waited for, and what was half written goes at the next start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.synchronizer.generation import newest_generation, path_of
from diloco.synchronizer.storage import open_kept, owned, retire, write_durably
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
    (tmp_path / "slot-3.spare").touch()
    (tmp_path / ".generation-1.safetensors.00.part").touch()
    with owned(tmp_path):
        write_durably(tmp_path / "kept", [b"a", memoryview(b"b")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "lock"]
    assert (tmp_path / "kept").read_bytes() == b"ab"


@pytest.mark.parametrize("content", [b"", b"short", b"longer than it was"])
def test_a_retired_file_is_written_over(tmp_path: Path, content: bytes) -> None:
    old, spare, new = (tmp_path / name for name in ("old", "spare", "new"))
    write_durably(old, [b"ten bytes."])
    retire(old, spare)
    inode = spare.stat().st_ino
    write_durably(new, [content[:3], memoryview(content)[3:]], spare=spare)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert new.read_bytes() == content
    assert new.stat().st_ino == inode


def test_a_file_that_somebody_reads_is_not_written_over(tmp_path: Path) -> None:
    old, spare = tmp_path / "old", tmp_path / "spare"
    write_durably(old, [b"as it was"])
    with os.fdopen(open_kept(old), "rb") as reader:
        retire(old, spare)
        assert list(tmp_path.iterdir()) == []
        write_durably(old, [b"other bytes"], spare=spare)
        assert reader.read() == b"as it was"


def test_a_file_with_another_name_is_not_written_over(tmp_path: Path) -> None:
    old, spare, backup = (tmp_path / name for name in ("old", "spare", "backup"))
    write_durably(old, [b"as it was"])
    backup.hardlink_to(old)
    retire(old, spare)
    assert not old.exists()
    write_durably(old, [b"other"], spare=spare)
    assert backup.read_bytes() == b"as it was"


def test_a_file_that_takes_a_name_over_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    path, spare = tmp_path / "name", tmp_path / "spare"
    write_durably(path, [b"first"])
    with os.fdopen(os.open(path, os.O_RDONLY), "rb") as late:
        retire(path, spare)
        with pytest.raises(FileNotFoundError):
            open_kept(path)
        write_durably(path, [b"other"], spare=spare)
        with os.fdopen(open_kept(path), "rb") as reader:
            assert reader.read() == b"other"
        assert os.path.samestat(os.fstat(late.fileno()), path.stat())
